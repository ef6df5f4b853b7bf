"""What all files of planning have in common."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.files import JsonFile
from harness.domain.graph import Graph, Operator
from harness.domain.prediction import Prediction
from harness.domain.profile import Profile
from harness.domain.strategy import Strategy

FILES: list[JsonFile] = [
    Cluster(nodes=[Node(name="a", devices=[Device(name="a:0", kind="CPU", memory_bytes=1)])]),
    Graph(name="tiny", batch=1, operators=[Operator(name="x", kind="input")]),
    Profile(model="tiny", measurements=[]),
    Strategy(name="tiny", batch=1, operators={}),
    Prediction(strategy="tiny", method="search", step_s=1.0),
]
ids = [type(one).__name__ for one in FILES]


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_a_file_is_read_as_it_was_written(value: JsonFile, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(value.to_json())
    assert type(value).load(path) == value


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_another_version_is_refused_with_what_is_read_and_the_remedy(value: JsonFile) -> None:
    kind = value.FILE
    assert kind.version == 1
    fields = msgspec.json.decode(value.to_json())
    data = msgspec.json.encode({**fields, "version": 2})
    with pytest.raises(kind.error) as caught:
        type(value).from_json(data, source="my.json")
    assert str(caught.value) == (
        f"my.json has schema {kind.schema} version 2, this harness reads {kind.schema} version 1: "
        f"{kind.remedy}"
    )


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_errors_name_the_file(value: JsonFile, tmp_path: Path) -> None:
    kind, path = value.FILE, tmp_path / "file.json"
    with pytest.raises(kind.error, match=f"^{kind.name} {path}: No such file or directory$"):
        type(value).load(path)
    path.write_bytes(b"Dense_100 2")
    with pytest.raises(kind.error, match=f"^{path} is not JSON: "):
        type(value).load(path)
    path.write_bytes(b"[]")
    with pytest.raises(kind.error, match=f"^{path}: Expected `object`, got `array`$"):
        type(value).load(path)
    with pytest.raises(kind.error, match=f"^{kind.name}: "):
        type(value).from_json(b"{}")
