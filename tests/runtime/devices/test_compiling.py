import io
import logging
import shutil
import sys
import sysconfig

import pytest
import torch
from torch import nn

from harness.errors import ConfigError
from harness.runtime.devices import compiling


def test_a_compiled_module_draws_and_gives_what_the_module_does():
    if not shutil.which("g++"):
        pytest.skip("TorchInductor needs g++")
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU())
    module = module.double()
    x = torch.rand(4, 8, dtype=torch.float64)
    found = []
    for call in (module, compiling.compiled_by_torch(module, x.device)):
        torch.manual_seed(3)
        module.zero_grad()
        call(x).sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_a_function_is_marked_as_uncompiled_without_the_import_of_the_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    compiling.uncompiled(lambda x: x)


def test_the_log_of_a_compilation_goes_to_a_stream_that_is_open(monkeypatch, capsys):
    """A process that was forked holds handlers of its parent's streams."""
    monkeypatch.setattr(compiling, "_check_compiler", lambda device: None)
    log = logging.getLogger("torch._dynamo")
    stream = io.StringIO()
    for handler in (*log.handlers, *logging.getLogger("torch").handlers):
        if type(handler) is logging.StreamHandler:  # not those of pytest
            handler.setStream(stream)
    stream.close()
    compiling.compiled_by_torch(torch.relu, torch.device("cpu"))
    log.error("told")
    log.warning("not told")
    assert capsys.readouterr().err.count("told") == 1


@pytest.mark.parametrize(
    ("device", "users", "names"),
    [
        ("cpu", "", r"g\+\+ or clang\+\+: .* name it in CXX"),
        ("cpu", "no-such-compiler", "no-such-compiler: .* name it in CXX"),
        ("cuda", "", "gcc or clang: .* name it in CC"),
    ],
)
def test_a_host_without_a_compiler_is_refused_with_the_remedy(
    device, users, names, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CXX", "CC"):
        monkeypatch.setenv(variable, users)
    with pytest.raises(ConfigError, match=f"this host has no {names}"):
        compiling.compiled_by_torch(torch.relu, torch.device(device))


def test_a_host_without_pythons_headers_is_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"Python\.h is missing: .*python3-dev"):
        compiling.compiled_by_torch(torch.relu, torch.device("cpu"))


def test_a_gpu_that_triton_has_no_code_for_is_refused(monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with pytest.raises(ConfigError, match=r"capability 7\.0 for Triton, Tesla P4 has 6\.1: do not"):
        compiling.compiled_by_torch(torch.relu, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    compiling.compiled_by_torch(torch.relu, torch.device("cuda"))
