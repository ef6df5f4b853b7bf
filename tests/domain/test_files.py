"""What all files of planning have in common."""

import msgspec
import pytest

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.files import JsonFile
from harness.domain.graph import Graph, Operator
from harness.domain.prediction import Prediction
from harness.domain.profile import Profile
from harness.domain.strategy import Strategy
from harness.errors import StrategyError

FILES: list[JsonFile] = [
    Cluster(nodes=[Node(name="a", devices=[Device(name="a:0", kind="CPU", memory_bytes=1)])]),
    Graph(
        name="tiny", batch=1,
        operators=[Operator(
            name="x", kind="conv2d", shape={"sample": 2, "feature": 3, "height": 4, "width": 5},
            forward_flops=1.5, parameter_bytes=12, signature="conv2d 3x3",
            attrs={"kernel": [3, 3], "bias": True, "function": "relu"},
        )],
    ),
    Profile(model="tiny", measurements=[]),
    Strategy(name="tiny", batch=1, operators={}),
    Prediction(strategy="tiny", method="search", step_s=1.0),
]  # fmt: skip
ids = [type(one).__name__ for one in FILES]


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_a_file_is_read_as_it_was_written(value, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(value.to_json())
    again = type(value).load(path)
    assert again == value
    assert again.to_json() == value.to_json()  # dims in their order too


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_another_version_is_refused_with_what_is_read_and_the_remedy(value):
    kind = value.FILE
    next_version = kind.version + 1
    fields = msgspec.json.decode(value.to_json())
    data = msgspec.json.encode({**fields, "version": next_version})
    with pytest.raises(kind.error) as caught:
        type(value).from_json(data, source="my.json")
    assert str(caught.value) == (
        f"my.json has schema {kind.schema} version {next_version}, this harness reads "
        f"{kind.schema} version {kind.version}: {kind.remedy}"
    )


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_a_file_of_another_kind_is_refused_without_the_advice_to_make_it_again(value):
    kind = value.FILE
    with pytest.raises(kind.error, match=f" {kind.schema} version .*: give a {kind.name}$"):
        type(value).from_json(b'{"schema": "harness-other", "version": 1}')


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_errors_name_the_file(value, tmp_path):
    kind, path = value.FILE, tmp_path / "file.json"
    said = f"^{kind.name} {path}: No such file or directory: name one that can be read$"
    with pytest.raises(kind.error, match=said):
        type(value).load(path)
    path.write_bytes(b"Dense_100 2")
    with pytest.raises(kind.error, match=f"^{path} is not JSON in line 1, 'Dense_100 2': invalid"):
        type(value).load(path)
    path.write_bytes(b"[]")
    with pytest.raises(kind.error, match=f"^{path}: Expected `object`, got `array`$"):
        type(value).load(path)
    with pytest.raises(kind.error, match=f"^{kind.name}: "):
        type(value).from_json(b"{}")


@pytest.mark.parametrize("value", FILES, ids=ids)
def test_a_field_that_nothing_reads_is_refused_with_its_name_and_the_file(value):
    fields = msgspec.json.decode(value.to_json())
    data = msgspec.json.encode({**fields, "microbatchs": 4})
    with pytest.raises(value.FILE.error, match=r"^my\.json: .* unknown field `microbatchs`"):
        type(value).from_json(data, source="my.json")
    next_version = value.FILE.version + 1
    newer = msgspec.json.encode({**fields, "microbatchs": 4, "version": next_version})
    with pytest.raises(value.FILE.error, match=rf"^my\.json has schema .* version {next_version}"):
        type(value).from_json(newer, source="my.json")


def test_a_name_that_stands_twice_is_refused():
    text = b'{"name": "s", "batch": 4, "operators": {"a": {"partition": {}, "devices": [0]}%s}}'
    again = b', "b": {"partition": {}, "devices": [1]}, "a": {"partition": {}, "devices": [2]}'
    assert Strategy.from_json(text % b"").operators["a"].devices == [0]
    with pytest.raises(StrategyError, match=r"^my\.json has 'a' twice in one object: keep one"):
        Strategy.from_json(text % again, source="my.json")


_LINK = {"source": "a:0", "target": "a:1", "bandwidth_bytes_per_s": 1.0, "latency": 1}
_MEASUREMENT = {"device_kind": "CPU", "operator": "x", "forward_s": 1, "backward_s": 1, "times": 3}


@pytest.mark.parametrize(
    ("kind", "data", "where"),
    [
        (Strategy, {"name": "s", "batch": 1, "operators": {"a": {"partition": {}, "devices": [0],
         "stages": 1}}}, "`stages` - at `$.operators['a']`"),
        (Strategy, {"name": "s", "batch": 1, "operators": {}, "stages": [{"recomputes": True}]},
         "`recomputes` - at `$.stages[0]`"),
        (Graph, {"name": "g", "operators": [{"name": "x", "kind": "input", "flops": 1}]},
         "`flops` - at `$.operators[0]`"),
        (Cluster, {"nodes": [{"name": "a", "devices": [], "nic": 1}]}, "`nic` - at `$.nodes[0]`"),
        (Cluster, {"nodes": [{"name": "a", "devices": [{"name": "a:0", "kind": "CPU",
         "memory_bytes": 1, "speeds": 2}]}]}, "`speeds` - at `$.nodes[0].devices[0]`"),
        (Cluster, {"nodes": [], "links": [_LINK]}, "`latency` - at `$.links[0]`"),
        (Profile, {"model": "m", "measurements": [_MEASUREMENT]},
         "`times` - at `$.measurements[0]`"),
    ],
)  # fmt: skip
def test_an_unknown_field_is_told_where_it_is(kind, data, where):
    with pytest.raises(kind.FILE.error) as caught:
        kind.from_json(msgspec.json.encode(data), source="my.json")
    assert str(caught.value) == f"my.json: Object contains unknown field {where}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  // by hand\n  "name": "s"}', "is not JSON in line 2, '// by hand': object"),
        ("name: s\nbatch: 1\n", "is not JSON in line 1, 'name: s': invalid character (byte 4)"),
        ('{"strategy": {}}', ": Object contains unknown field `strategy`: the fields are name"),
        ('{"name": "s", "batch": 1, "schedule": "1F1B"}', "`$.schedule`: choose one of gpipe"),
        ('{"name": "s", "batch": 1, "operators": {"a": {"partition": {}, "devices": [0]}, "b": 1}}',
         "Expected `object`, got `int` - at `$.operators['b']`"),
    ],
)  # fmt: skip
def test_a_file_by_hand_is_told_line_key_fields_and_values(text, message):
    with pytest.raises(StrategyError) as caught:
        Strategy.from_json(text.encode(), source="my.json")
    assert message in str(caught.value)


def test_bytes_that_are_no_text_in_what_is_left_out_are_no_error_of_another_kind():
    data = Prediction(strategy="s", method="m", step_s=1.0, spans={"0": []}).to_json()
    data = data.replace(
        b'"0":[]', b'"0":[{"type":"span","kind":"step","x":"\xff","start_s":0,"duration_s":0}]'
    )
    assert Prediction.from_json(data).spans["0"][0].kind == "step"
