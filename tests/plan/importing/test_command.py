"""`import` of curves, layers and operators, and `predict --layout`, from files to a step."""

import json
import re

import msgspec
import pytest

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import OptimizerTime, Profile
from harness.errors import DataError
from harness.plan.importing.curves import bandwidth_of, read_collectives

TIMES = """\
layer,tp,microbatch,forward_s,backward_s,parameter_bytes,output_bytes
a,1,2,1,2,100,50
b,1,2,1,2,100,50
a,2,2,0.75,1.5,100,50
b,2,2,0.75,1.5,100,50
"""
CURVE = "size(B),time(ms)\n100,250\n200,500\n"


@pytest.fixture
def imported(tmp_path, printed):
    (tmp_path / "gpt.csv").write_text(TIMES)
    (tmp_path / "gpus_2.csv").write_text(CURVE)
    files = ("--layer-times", tmp_path / "gpt.csv", "--collectives", tmp_path / "gpus_2.csv")
    said = printed("import --topology 1x4 --memory 1GB", *files, "--output", tmp_path).out
    assert "links inside nodes have 4e-07 GB/s, by all-reduce of 2" in said
    assert "taken off by the cluster" in said
    return tmp_path


@pytest.fixture
def predicted(imported, printed):
    """A layout's prediction by the imported files."""
    files = ("--profile", imported / "profile-gpt.json", "--cluster", imported / "cluster.json")
    return lambda *words: json.loads(printed("predict --json", *files, "--layout", *words).out)


def test_collectives_are_taken_off_and_predicted_again(imported, predicted):
    profile = Profile.load(imported / "profile-gpt.json")
    # Two devices exchange 100 B at 400 B/s: 0.25 s after a, and before b for the gradient.
    found = [(p.forward_s, p.backward_s) for p in profile.measurements if "heads" in p.shape]
    assert found == [(0.5, 1.5), (0.75, 1.25)]
    step = predicted("tp=2 --batch-size 2")
    assert step["step_s"] == pytest.approx(4.5)
    assert step["strategy"]["operators"]["a"]["devices"] == [0, 1]


def test_collectives_of_a_given_cluster_are_taken_off(imported, tmp_path, printed):
    files = ("--layer-times", imported / "gpt.csv", "--cluster", imported / "cluster.json")
    said = printed("import", *files, "--output", tmp_path / "again").out
    assert "taken off by the cluster" in said
    for name in ("profile-gpt.json", "cluster.json"):
        assert (tmp_path / "again" / name).read_bytes() == (imported / name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--operators gpt.csv", "are times of two models: give one of them"),
        ("--collectives gpus_2.csv", "are a cluster's: give its --topology, or --cluster"),
        ("--batch-size 8", "--batch-size is of --operators: give that, or drop it"),
        ("--n-layers 2", "--n-layers is of --operators"),
        ("--ranks 8", "--ranks is of --collectives"),
        ("--bandwidth 1e9", "--bandwidth is of --topology"),
        ("--cluster c.json --memory 1GB", "--memory is of --topology"),
    ],
)
def test_an_input_that_would_be_ignored_is_refused(tmp_path, refused, flags, message):
    assert message in refused("import --layer-times gpt.csv", flags, "--output", tmp_path)


def test_times_of_more_parts_than_the_cluster_has_devices_are_refused(tmp_path, refused):
    (tmp_path / "gpt.csv").write_text(TIMES)
    words = ("--layer-times", tmp_path / "gpt.csv", "--output", tmp_path)
    said = refused("import --topology 1x1 --bandwidth 1e9 --memory 1GB", *words)
    assert "has times at tp 2, and the cluster 1 devices" in said


def test_pipeline_of_a_layout_fills_and_drains(predicted):
    step = predicted("pp=2,cuts=1 --batch-size 4 --microbatches 2 --schedule gpipe")
    # Three slots of forward and of backward, and 0.25 s of transfer in each.
    assert step["step_s"] == pytest.approx(3 * 3 + 2 * 0.25)


def test_a_step_has_the_optimizer_that_the_profile_has_timed(imported, predicted):
    before = predicted("dp=1 --batch-size 2")["step_s"]
    path = imported / "profile-gpt.json"
    profile = Profile.load(path)
    kind = profile.device_kinds[0]
    times = [OptimizerTime(device_kind=kind, optimizer="adamw", s_per_byte=0.01)]
    path.write_bytes(msgspec.structs.replace(profile, optimizers=times).to_json())
    after = predicted("dp=1 --batch-size 2")["step_s"]
    assert after - before == pytest.approx(200 * 0.01)  # bytes of the parameters of both layers


def test_an_optimizer_without_a_memory_rate_is_said_to_take_no_time(imported, printed):
    files = ("--layer-times", imported / "gpt.csv", "--output", imported / "timed")
    untimed = "assumed: the optimizer takes no time on device: `./entry.sh profile` measures it"
    assert untimed in printed("import", *files).out
    words = "predict --layout dp=1 --batch-size 2 --json --topology 1x1 --bandwidth 1e9"
    words = (words, "--memory 1GB --profile", imported / "timed" / "profile-gpt.json")
    before = printed(*words)
    assert untimed in before.err
    said = printed("import --memory-bandwidth 100B/s", *files).out
    assert "assumed: the optimizer reads and writes each of its tensors once" in said
    after = printed(*words)
    assert "optimizer" not in after.err
    # Of 200 bytes of parameters SGD with momentum reads three tensors and writes two.
    took_s = json.loads(after.out)["step_s"] - json.loads(before.out)["step_s"]
    assert took_s == pytest.approx(200 * 5 / 100)


def test_imported_layers_are_said_to_have_one_backward(imported, printed):
    files = ("--layer-times", imported / "gpt.csv", "--output", imported)
    whole = "assumed: backward is not split into inputs and weights"
    assert whole in printed("import", *files).out
    words = "--topology 1x2 --bandwidth 1e9 --memory 1GB --batch-size 4 --microbatches 2"
    words = (f"predict --layout pp=2 --json {words} --profile", imported / "profile-gpt.json")
    split, flushed = printed(*words, "--schedule zero_bubble"), printed(*words, "--schedule 1f1b")
    assert whole in split.err
    assert whole not in flushed.err
    assert json.loads(split.out)["step_s"] == json.loads(flushed.out)["step_s"]


def test_a_prediction_by_a_bad_fit_names_the_operators(tmp_path, printed):
    rows = "layer,tp,microbatch,forward_s,backward_s\n"
    rows += "".join(f"a,1,{n},1,2\n" for n in (1, 2, 4, 8))
    rows += "".join(f"b,1,{n},{s},{2 * s}\n" for n, s in ((1, 1), (2, 9), (4, 1), (8, 9)))
    (tmp_path / "gpt.csv").write_text(rows)
    printed("import --layer-times", tmp_path / "gpt.csv", "--output", tmp_path)
    words = "predict --layout dp=1 --batch-size 3 --topology 1x1 --bandwidth 1e9 --memory 1GB"
    told = printed(words, "--profile", tmp_path / "profile-gpt.json").err
    (line,) = (line for line in told.splitlines() if line.startswith("warning:"))
    assert re.search(r"more than 50% for \d+% of a step on device, above all b \(\d+%\)", line)


@pytest.mark.parametrize(
    "times",
    [
        "backward_s;forward_s\r\n50;2;a;1;2;1\r\n",
        "Backward (ms);Forward_us\r\n50;2;a;1;2000;1000000\r\n",
    ],
)
def test_columns_may_stand_in_any_order_in_capitals_in_other_units_parted_by_semicolons(
    tmp_path, printed, times
):
    text = "Output_Bytes;microbatch;LAYER;tp;" + times
    (tmp_path / "gpt.csv").write_bytes(text.encode())
    printed("import --layer-times", tmp_path / "gpt.csv", "--output", tmp_path)
    (point,) = Profile.load(tmp_path / "profile-gpt.json").measurements
    assert (point.forward_s, point.backward_s) == (1, 2)
    graph = Graph.load(tmp_path / "profile-gpt.graph.json")
    assert graph.operators[0].activation_bytes == 50


def test_an_uncut_layer_without_a_time_takes_as_long_as_its_parts(tmp_path, printed):
    rows = "layer,tp,microbatch,forward_s,backward_s\na,4,1,1,2\na,8,1,0.5,1\n"
    (tmp_path / "gpt.csv").write_text(rows)
    words = ("--layer-times", tmp_path / "gpt.csv", "--output", tmp_path)
    said = printed("import --topology 1x8 --bandwidth 1e9 --memory 1GB", *words).out
    assert "assumed: at tp 1 a layer takes 4 times as long as at tp 4, the lowest on device" in said
    files = ("--profile", tmp_path / "profile-gpt.json", "--cluster", tmp_path / "cluster.json")
    found = [
        json.loads(printed("predict --json --batch-size 1", *files, "--layout", f"tp={tp}").out)
        for tp in (1, 2, 4, 8)
    ]
    assert [step["step_s"] for step in found] == pytest.approx([12, 6, 3, 1.5])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,1,2,1,2,100,50\na,1,2,1,2,100,50", "two times"),
        ("a,1,2,1,2,100,50\na,2,2,1,2,101,50", "other bytes"),
        ("a,1,2,1,2,1,1\nb,1,2,1,2,1,1\na,2,2,1,2,1,1", "has no time"),
        ("a,1,2,-1,2,1,1", "write a number"),
        (",1,2,1,2,1,1", "layer is empty"),
        ("a,1048575,2,1,2,1,1\na,1048573,2,1,2,1,1", "needs 1099507433475 heads, 1048576 are the"),
        ('{"traceEvents": []}', "is JSON, not a table"),
    ],
)
def test_bad_layer_times_are_refused(tmp_path, refused, rows, message):
    header = "" if rows.startswith("{") else TIMES.splitlines()[0] + "\n"
    (tmp_path / "gpt.csv").write_text(header + rows + "\n")
    words = ("--layer-times", tmp_path / "gpt.csv", "--output", tmp_path / "out")
    assert message in refused("import --topology 1x2 --bandwidth 1e9 --memory 1GB", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("ouput_bytes", "a column 'ouput_bytes': is it 'output_bytes'? rename"),
        ("comment", "a column 'comment', which is none of layer, tp"),
        ("output_bytes,Output_Bytes", "column 'output_bytes' twice"),
    ],
)
def test_a_column_that_would_be_ignored_is_refused(tmp_path, refused, columns, message):
    cells = ",".join("1" * (1 + columns.count(",")))
    text = f"layer,tp,microbatch,forward_s,backward_s,{columns}\na,1,2,1,2,{cells}\n"
    (tmp_path / "gpt.csv").write_text(text)
    words = ("import --layer-times", tmp_path / "gpt.csv", "--output", tmp_path)
    assert message in refused(*words)


LAYER = "a{0},1,2,\"{{'nn': ('h.{0}', <class 'x'>)}}\""


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ("input_nodes\na,1,2,{}", "", "has a column 'input_nodes': is it '_input_nodes'?"),
        ("_input_nodes\na,1,2,{b: None}\nb,1,2,{}", "", "'a' reads 'b', which is no row above"),
        ("_input_nodes\n,1,2,{}", "", "Name is empty"),
        ("meta\na,1,2,x", "--n-layers 0", "--n-layers is 0: give a number from 1 to 10000"),
        ("meta\na,1,2,x", "--collectives c.csv --ranks -3", "--ranks is -3"),
        (
            f"meta\n{LAYER.format(0)}\n{LAYER.format(1)}",
            "--n-layers 12",
            "has operators of 2 layers, and the model has 12: give a table of one layer, or of all",
        ),
    ],
)
def test_bad_operators_are_refused(tmp_path, refused, rows, flags, message):
    (tmp_path / "o.csv").write_text(f"Name,fw_latency,bw_latency,{rows}\n")
    words = ("import --batch-size 8", flags, "--operators", tmp_path / "o.csv")
    assert message in refused(*words, "--output", tmp_path)


def test_only_what_timing_takes_is_taken_off_and_said(tmp_path, printed):
    """Operators that all take as long would keep no time."""
    for shortest, kept, said in ((1.0, 1.0, ""), (0.01, 0.99, "takes 10 us of its forward and")):
        rows = ["Name,fw_latency,bw_latency", f"view,{shortest},{shortest}"]
        rows += [f"op{k},1,1" for k in range(20)]
        (tmp_path / "o.csv").write_text("\n".join(rows))
        words = ("--operators", tmp_path / "o.csv", "--batch-size 8 --output", tmp_path)
        out = printed("import", *words).out
        assert ("timing an operator" in out, said in out) == (bool(said), True)
        assert "parameters and outputs cost nothing" in out
        times = Profile.load(tmp_path / "profile-o.json").measurements
        assert times[-1].forward_s == pytest.approx(kept / 1e3)


def test_each_branch_of_a_repeated_layer_reads_the_layer_before(tmp_path, printed):
    reads = {"x": "", "q": "x: 0", "k": "x: 0", "k2": "k: 0", "o": "q: 0, k2: 0"}
    lines = ["Name,fw_latency,bw_latency,_input_nodes,meta"]
    lines += [
        f"{name},1,1,\"{{{inputs}}}\",\"{{'nn': ('{'h.0' if inputs else 'h'}', <class 'x'>)}}\""
        for name, inputs in reads.items()
    ]
    (tmp_path / "o.csv").write_text("\n".join(lines))
    words = ("--operators", tmp_path / "o.csv", "--batch-size 8 --output", tmp_path)
    printed("import --n-layers 2", *words)
    graph = Graph.load(tmp_path / "profile-o.graph.json")
    read = {operator.name: set(operator.inputs) for operator in graph.operators[5:]}
    assert read == {"q.1": {"x", "o"}, "k.1": {"x", "o"}, "k2.1": {"k.1"}, "o.1": {"q.1", "k2.1"}}


def test_ranks_are_of_the_curves_that_do_not_say_theirs(imported, tmp_path, printed, refused):
    (tmp_path / "curve.csv").write_text(CURVE)
    out = tmp_path / "new"
    words = ("import --cluster", imported / "cluster.json", "--output", out, "--collectives")
    files = (imported / "gpus_2.csv", tmp_path / "curve.csv")
    said = printed(*words, *files, "--ranks 4").out
    assert "dropped: the collectives that" in said
    assert {p.n_ranks for p in Cluster.load(out / "cluster.json").collectives} == {2, 4}
    assert "--ranks is 4, and --collectives are of [2] ranks" in refused(
        *words, files[0], "--ranks 4"
    )


NCCL = """\
# nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid   1 on   host device  0 [0x07] NVIDIA A100
#  Rank  1 Group  0 Pid   1 on   host device  1 [0x0f] NVIDIA A100
#
#                                                       out-of-place                  in-place
#  size   count  type  redop  root   time  algbw  busbw #wrong    time  algbw  busbw #wrong
#   (B)   (elements)                 (us)  (GB/s) (GB/s)          (us)  (GB/s) (GB/s)
    1024     256  float    sum    -1  10.00   0.10   0.10      0   9.00   0.11   0.11      0
 1000000  250000  float    sum    -1  50.00  20.00  20.00      0  49.00  20.41  20.41      0
# Out of bounds values : 0 OK
"""
CSV = "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n1000,250,float,500,3,900,2\n"


def test_nccl_tests_are_read_out_of_place(tmp_path):
    path = tmp_path / "all_reduce.txt"
    path.write_text(NCCL)
    points = read_collectives(path)
    assert [(p.n_ranks, p.n_bytes, round(p.duration_s * 1e6)) for p in points] == [
        (2, 1024, 10),
        (2, 1000000, 50),
    ]
    assert bandwidth_of(points) == pytest.approx(20e9)


def test_hosts_and_groups_of_nccl_tests_count(tmp_path, refused):
    path = tmp_path / "all_reduce.txt"
    words = "import --memory 1GB --bandwidth 1e9 --output", tmp_path, "--collectives", path
    path.write_text(NCCL)
    message = "is of 2 ranks on 1 host, and would count as between nodes, because a node has 1 dev"
    assert message in refused(*words, "--topology 2x1")
    table = NCCL.partition("[0x0f] NVIDIA A100\n")[2]
    lines = [
        f"#  Rank  {k} Group  {k % 4} Pid   1 on   {'ab'[k // 4]} device  {k % 4} [0x07] T4\n"
        for k in range(8)
    ]
    path.write_text("".join(lines) + table)
    assert {point.n_ranks for point in read_collectives(path)} == {2}
    message = "is of 2 ranks on 2 hosts, and would count as inside a node, because a node has 4 dev"
    assert message in refused(*words, "--topology 2x4")
    without = [str(word).replace("--bandwidth 1e9", "") for word in words]
    assert message in refused(*without, "--topology 2x4")  # which has no curve between nodes
    path.write_text("".join(lines[1:]) + table)
    with pytest.raises(DataError, match="groups of 1 and 2 ranks: split the ranks evenly"):
        read_collectives(path)


RANKS = "".join(
    f"#  Rank  {k} Group  0 Pid   1 on   host device  {k} [0x07] T4\n" for k in range(8)
)
ALLTOALL = f"""\
[node0:31] mpirun warning, of the network
# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: alltoall_perf
{RANKS}NCCL version 2.28.7+cuda13.0
#                                          out-of-place                in-place
#  size   count  type  redop  root     time  algbw  busbw #wrong     time  algbw  busbw #wrong
#   (B)   (elements)                   (us)  (GB/s) (GB/s)           (us)  (GB/s) (GB/s)
    1024     128  float   none    -1  20.00   0.05   0.05      0  19.00   0.05   0.05    N/A
# Collective test concluded: alltoall_perf
"""
OLD_ALL_GATHER = f"""\
{RANKS}#  size   count  type    time  algbw  busbw  error    time  algbw  busbw  error
#   (B)   (elements)      (us)  (GB/s) (GB/s)          (us)  (GB/s) (GB/s)
    1024      32  float  20.00   0.05   0.05  0e+00  19.00   0.05   0.05  0e+00
"""


@pytest.mark.parametrize(
    ("name", "text", "operation"),
    [
        ("out.log", ALLTOALL, "all_to_all"),
        ("out.log", ALLTOALL.replace("\n", "\r\n"), "all_to_all"),
        ("out.log", ALLTOALL.replace("none    -1", ""), "all_to_all"),  # blank columns
        ("out.log", ALLTOALL.replace("19.00   0.05   0.05    N/A", ""), "all_to_all"),
        ("out.log", ALLTOALL.replace("N/A", "N/A 2026-01-01 10:00:00"), "all_to_all"),
        ("all-gather.txt", OLD_ALL_GATHER, "all_gather"),
        ("out.log", re.sub("^", "[1,0]<stdout>:", ALLTOALL, flags=re.M), "all_to_all"),
        ("AG_GPU8.csv", "time(us),size(KiB)\n20,1\n", "all_gather"),
        ("8gpus.csv", "size_bytes;time_us\n1024;20\n".replace(";", ","), "all_reduce"),
        ("8_ranks.csv", "Size (MiB),Time (ms)\n0.0009765625,0.02\n", "all_reduce"),
        ("8_ranks.csv", "size(B),time(us),size(KiB),time(ms)\n1024,20,9,9\n", "all_reduce"),
    ],
)
def test_collective_size_and_time_are_found_in_each_form(tmp_path, name, text, operation):
    path = tmp_path / name
    path.write_bytes(text.encode())
    (point,) = read_collectives(path)
    assert (point.operation, point.n_ranks, point.n_bytes) == (operation, 8, 1024)
    assert point.duration_s == pytest.approx(20e-6)


def test_several_times_of_one_size_count_by_their_median(imported, printed):
    for run, seconds in enumerate((5, 9, 1)):
        (imported / f"gpus_2_run{run}.csv").write_text(f"size(B),time(s)\n8,2\n8,4\n80,{seconds}\n")
    files = sorted(imported.glob("*_run*"))
    cluster = ("--cluster", imported / "cluster.json", "--output", imported)
    printed("import", *cluster, "--collectives", *files)
    found = Cluster.load(imported / "cluster.json").collectives
    assert [(point.n_bytes, point.duration_s) for point in found] == [(8, 3.0), (80, 5.0)]


def test_curves_of_a_node_and_between_nodes_give_the_bandwidths_of_each(tmp_path, printed, refused):
    for n, seconds in ((2, 1), (4, 15)):
        (tmp_path / f"gpus_{n}.csv").write_text(f"size(B),time(s)\n10000,{seconds}\n")
    words = "import --topology 2x2 --memory 1GB --output", tmp_path, "--collectives"
    files = tmp_path / "gpus_2.csv", tmp_path / "gpus_4.csv"
    message = (
        "no all-reduce of more ranks than a node of 2x2 has: give --bandwidth INSIDE[,BETWEEN]"
    )
    assert message in refused(*words, files[0])
    assert "curves of up to 2 ranks, which fit into a node, are of" in printed(*words, *files).out
    links = Cluster.load(tmp_path / "cluster.json").links
    assert [link.bandwidth_bytes_per_s for link in links[:3]] == [10_000, 1000, 1000]


def test_csv_takes_ranks_from_its_name_and_the_first_time(tmp_path):
    path = tmp_path / "AR_GPU4_1K"
    path.write_text(CSV)
    (point,) = read_collectives(path)
    assert (point.n_ranks, point.n_bytes, point.duration_s) == (4, 1000, pytest.approx(5e-7))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("curve.csv", CSV, "how many ranks"),
        ("gpu4.csv", "size(B),time\n1,2\n", "needs time"),
        ("gpu4.csv", "size(B),time(ns)\n1\n", "1 cells, its header 2"),
        ("gpu4.csv", "size(B),time(ns)\nx,2\n", "write a number"),
        ("gpu4.csv", "size(GB),time(ns)\n1e12,2\n", "no buffer is so large"),
        ("gpu4.csv", "size(parsec),time(ns)\n1,2\n", "needs size"),
        ("run2_gpus_8.csv", CSV, "how many ranks"),
        ("2nodes_8gpus.csv", CSV, "how many ranks"),  # of each node, or of all?
        ("x.txt", OLD_ALL_GATHER, "does not say which collective"),
        ("x.txt", ALLTOALL + NCCL + "all_reduce_perf", "has 2 tables: write one test to a file"),
        ("x.txt", ALLTOALL.replace("alltoall_perf", "sendrecv_perf"), "is of sendrecv"),
        ("x.txt", ALLTOALL.replace("(us)", "(min)"), "times in min"),
        (
            "x.txt",
            NCCL.replace("0.11      0", "0.11      3"),
            "3 wrong values at 1024 bytes: repair",
        ),
        ("x.txt", NCCL.replace("0.11      0", "0.11  1e+06"), "1000000 wrong values at 1024 bytes"),
        ("x.txt", NCCL.replace("0 OK", "2 FAILED"), "has 2 values out of bounds: repair"),
        ("sendrecv_gpu4.csv", CSV, "is of sendrecv by its name"),
        ("Reduce_gpu4.csv", CSV, "is of reduce by its name"),
        ("x.txt", "# OSU MPI Allreduce\n# Size  Latency(us)\n4  1.5\n", "it needs size"),
        ("gpu4.csv", "size(B),time(ns)\n0,0\n", "no curve"),
        ("gpu4.csv", "", "no row"),
    ],
)
def test_bad_curves_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_collectives(path)
