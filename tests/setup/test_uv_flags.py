"""uv is given the package sources that pip's configuration names."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def uv_flags():
    path = Path(__file__).parents[2] / "setup" / "uv_flags.py"
    spec = importlib.util.spec_from_file_location("uv_flags", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_source_is_handed_over_once(uv_flags):
    listing = [
        ":env:.find-links='/opt/wheels'",
        "global.find-links='/opt/wheels /opt/more'",
        "global.index-url='https://packages.example/simple'",
        "global.extra-index-url='https://one.example/simple\\nhttps://two.example/simple'",
        "global.timeout='60'",
    ]
    settings = uv_flags.parse(listing)
    assert uv_flags.variables(settings) == [
        "UV_FIND_LINKS=/opt/wheels,/opt/more",
        "UV_DEFAULT_INDEX=https://packages.example/simple",
        "UV_INDEX=https://one.example/simple https://two.example/simple",
    ]


def test_a_password_in_a_source_is_no_argument(uv_flags):
    settings = uv_flags.parse(["global.index-url='https://me:secret@packages.example/simple'"])
    assert uv_flags.flags(settings) == ["--index-strategy", "unsafe-best-match"]
    assert "secret" in uv_flags.variables(settings)[0]


def test_an_offline_configuration_stays_offline(uv_flags):
    assert uv_flags.flags(uv_flags.parse(["global.no-index='true'"]))[-1] == "--no-index"
    assert "--no-index" not in uv_flags.flags(uv_flags.parse(["global.no-index='false'"]))
