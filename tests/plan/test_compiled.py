"""The cache of compiled kernels."""

import shutil
import sys
from pathlib import Path

from launching import completed

PLAN = Path(__file__).parents[2] / "harness" / "plan"
KERNEL = """\
from harness.plan.compiled import compiled

@compiled
def called(x):
    return x + {added}
"""
CALLER = """\
from harness.plan.compiled import compiled
from harness.plan.called import called

@compiled
def calling(x):
    return 10 * called(x)
"""


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # it is by whole seconds
    plan = tmp_path / "harness" / "plan"
    plan.mkdir(parents=True)
    for package in (plan.parent, plan):
        (package / "__init__.py").touch()
    shutil.copy(PLAN / "compiled.py", plan)
    (plan / "calling.py").write_text(CALLER)

    def result(added):
        (plan / "called.py").write_text(KERNEL.format(added=added))
        program = "from harness.plan.calling import calling; print(calling(1))"
        done = completed(sys.executable, "-c", program, cwd=tmp_path)
        return done.stdout.strip() or done.stderr

    assert [result(1), result(1), result(2)] == ["20", "20", "30"]
    assert len(list((tmp_path / "cache").iterdir())) == 2
