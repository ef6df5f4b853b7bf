"""How a command line's program ends."""

import subprocess
import sys

import pytest
from launching import completed

from harness.errors import ConfigError, run_command


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--x is 1"), 2, "plan: --x is 1\n"),
        (KeyboardInterrupt(), 130, "plan: interrupted\n"),
        (
            ModuleNotFoundError("No module named 'a'", name="a"),
            2,
            f"plan: {sys.executable} has no module a: run `source .venv/bin/activate`, or "
            "`bash setup/install.sh` first\n",
        ),
    ],
)
def test_errors_and_interrupts_are_one_line(error, code, line, capsys):
    assert run_command("plan", lambda: fail(error)) == code
    assert capsys.readouterr() == ("", line)


def test_characters_that_a_terminal_lacks_are_escaped():
    program = (
        "from harness.errors import run_command\n"
        "run_command('plan', lambda: print('2 \\u00d7 b\\udcff') or 0)"
    )
    done = completed(sys.executable, "-c", program, PYTHONIOENCODING="ascii")
    assert done.stdout == "2 \\xd7 b\\udcff\n"


_PRINTS = (
    "from harness.errors import run_command\n"
    "raise SystemExit(run_command('plan', lambda: print('x' * 10**6) or 0))"
)


@pytest.mark.parametrize(
    ("words", "code"), [(["-c", _PRINTS], 141), (["-m", "harness", "matmul", "--help"], 0)]
)
def test_output_without_a_reader_ends_silently(words, code):
    child = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    _, stderr = child.communicate()
    assert (child.returncode, stderr) == (code, b"")


@pytest.mark.parametrize("words", [["harness", "matmul", "--dry-run"], ["harness.plan", "--help"]])
def test_a_program_that_was_started_without_output_ends_well(words):
    done = completed("bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-m", *words)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
