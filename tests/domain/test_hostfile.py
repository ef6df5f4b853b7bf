"""Hostfiles are data: what mpirun takes is taken alike, the rest is refused with what to write."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from launching import MPIRUN, completed

from harness.domain.hostfile import Host, load_hostfile, parse_hostfile
from harness.errors import HostfileError

# What the installed mpirun allocates of each was read from `--display-map` (and is, below).
TAKEN = {
    "a slots=2\nb slots=1\n": {"a": 2, "b": 1},
    "# two lab machines\na slots=4\nb slots=4   # second\n": {"a": 4, "b": 4},
    "// nodes\na slots=2//two\nb slots=1#c\n": {"a": 2, "b": 1},
    "a slots=2\na\nb slots=2\n": {"a": 3, "b": 2},
    "a slots=1\nb slots=1\na\na\n": {"a": 3, "b": 1},
    "a\na\nb slots=1\n": {"a": 2, "b": 1},
    "a slots=4 max_slots=4\nb max_slots=4\n": {"a": 4, "b": 4},
    "a max_slots=4\na\n": {"a": 5},
    "a max-slots=2\na max-slots=3\n": {"a": 3},
    "a\na max_slots=4\n": {"a": 2},
    "a max_slots=2 slots=4\n": {"a": 4},
    "a cpu=4\nb count=3\nc max-cpu=2\nd count_max=5\ne slots-max=1\n": {
        "a": 4, "b": 3, "c": 2, "d": 5, "e": 1,
    },
    "a slots = 2 max_slots =3\n\tb\tslots=02 \n": {"a": 2, "b": 2},
    "10.0.0.1 slots=2\n10.0.0.2 slots=1\n12-3 slots=1\n": {"10.0.0.1": 2, "10.0.0.2": 1, "12-3": 1},
    "rank 0=a slot=0\nrank 1=b slots=0:0-1\nrank 2 = a\n": {"a": 2, "b": 1},
    "a slots=2\nrank 0=a slot=1\n": {"a": 3},
    "node-a slots=128\n": {"node-a": 128},
    "a slots=2\n   ": {"a": 2},
}  # fmt: skip


@pytest.mark.parametrize("text", TAKEN)
def test_what_mpirun_takes_means_the_same_here(text):
    assert {host.name: host.slots for host in parse_hostfile(text)} == TAKEN[text]


@pytest.mark.mpi
@pytest.mark.parametrize("text", TAKEN)
def test_mpirun_allocates_the_same(text, tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text(text)
    words = ("--hostfile", hostfile, "--display-map", "--do-not-launch", "true")
    path = f"{MPIRUN.parent}:{os.environ['PATH']}"
    done = completed(MPIRUN, *words, timeout_s=120, PATH=path)
    nodes = re.findall(r"Data for node: (\S+)\s+Num slots: (\d+)", done.stdout)
    assert {name: int(slots) for name, slots in nodes} == TAKEN[text], done.stdout + done.stderr


def test_a_host_without_slots_has_as_many_as_its_cores():
    assert parse_hostfile("a\nb slots=1\n") == [Host("a"), Host("b", 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node1:4 # first", "MPICH's form: write `node1 slots=4`"),
        ("127.0.0.1:16", "write `127.0.0.1 slots=16`"),
        ("node1:4 slots=2", "write `node1 slots=4`"),
        ("node1:22 slots=2", "write `node1 slots=2`, and `Port 22` below `Host node1`"),
        ("my.mpi.node:2222", "write `my.mpi.node slots=1`, and `Port 2222`"),
        ("root@a slots=2", "write `a slots=2`, and `User root` below `Host a` in ~/.ssh/config"),
        ("a slots=2 username=bob", "write `a slots=2`, and `User bob`"),
        ("gpu[01-04]", "Slurm's list of hosts: write a line for each, the first `gpu01 slots=1`"),
        ("gpu[1,3-5],login slots=8", "the first `gpu1 slots=8`"),
        ("node1.lab.test. slots=1", "ends with a dot: write `node1.lab.test slots=1`"),
        ("fe80::1 slots=1", "fe80::1 is an IPv6 address"),
        ("[fd00::1] slots=1", "IPv6 address"),
        ("10.0.0.1 node1.lab node1", "line of /etc/hosts: write `node1.lab slots=1`"),
        ("a,b slots=2", "write one a line, `a slots=2`, `b slots=2`"),
        ("a_b slots=2", "write `a-b slots=2`, and `HostName a_b` below `Host a-b`"),
        ("+n0 slots=2", "it does not name one host"),
        ("^a", "it does not name one host"),
        ("; x", "write comments as `# ...`"),
        ("/* x */ a", "write comments as `# ...`"),
        ("a slots=2 ; two", "write `a slots=2 # ...`"),
        ('"a" slots=2', "write `a slots=2`"),
        ("slots=2 a", "write `a slots=2`"),
        ("rank0=a slot=0", "write `a slots=1`"),
        ("a 4", "unknown option '4', expected slots=N: write `a slots=4`"),
        ("a slots 4", "write `a slots=4`"),
        ("a slots:4", "write `a slots=4`"),
        ("a:slots=4", "write `a slots=4`"),
        ("h1:2,h2", "write one a line, `h1 slots=2`, `h2 slots=1`"),
        ("a lots=8", "unknown option 'lots=8', expected slots=N: write `a slots=8`"),
        ("a Slots=8", "write `a slots=8`"),
        ("a gpus=2", "unknown option 'gpus=2', expected slots=N: write `a slots=2`"),
        ("a sockets=2 slots=4", "unknown option 'sockets=2', expected slots=N: write `a slots=4`"),
        ("a slots=2, max_slots=4", "write `a slots=2`"),
        (
            "a slots=auto",
            "slots is 'auto', it must be a whole number above 0, up to 65536: write `a slots=1`",
        ),
        ("a slots=two", "write `a slots=1`, the number of its GPUs"),
        ("a slots=0", "to leave a out, write `# a`"),
        ("a slots=-1", "slots is '-1'"),
        ("a slots=2.5", "write `a slots=2`"),
        ("a slots=\u00b2", "slots is '\u00b2'"),
        ("a slots=\u0662", "whole number"),
        ("a slots=" + "9" * 500, "whole number"),
        ("a slots=", "slots is ''"),
        ("a slots=2 slots=3", "said twice (first in line 2)"),
        ("a slots=4 max_slots=2", "write `a slots=4`"),
        ("a\u00a0slots=2", "U+00A0 is no blank to mpirun: write `a slots=2`"),
        ("a\u2028b", "U+2028 is no blank"),
        ("a;reboot", "it is not one host"),
        ("-oProxyCommand=evil", "not a host name"),
        ("$(id)", "not a host name"),
        ("slots", "not a host name"),
        ("10.0.0.300", "not a host name or address"),
        ("10.0.1", "not a host name or address"),
        ("a..b", "not a host name"),
        ("n\u00f6de", "not a host name"),
        (" " * 10**6 + "a" + " " * 10**6 + "slots=1", "characters, 1000 at most"),
        ("a slots=1 " + "=" * 10**6, "characters, 1000 at most"),
    ],
)
def test_what_mpirun_reads_otherwise_is_refused_with_the_line_to_write(line, message):
    with pytest.raises(HostfileError, match="hosts.txt:2: .*" + re.escape(message)):
        parse_hostfile(f"# head\n{line}\nz slots=1\n", source="hosts.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# only\n\n", "names no host"),
        ("a slots=2\nb slots=1\na slots=3\n", "txt:3: .*twice .first in line 1.*`a slots=5`"),
        ("a\na slots=2\n", "`a slots=3`"),
        ("gpu1.lab slots=1\ngpu1.site slots=1\n", "first dot, so that gpu1.lab and gpu1.site are"),
        ("a slots=1\r\nb slots=1\r\n", "carriage returns .Windows., .*run `sed -i .* my.txt`"),
        ("a slots=1\rb slots=1\r", "carriage returns"),
        ("\ufeffa slots=1\n", "byte-order mark, .*run `sed -i .* my.txt`"),
        ("a slots=1\n# end", "comment without a newline, .*run `echo >> my.txt`"),
    ],
)
def test_what_is_wrong_with_the_whole_is_refused(text, message):
    with pytest.raises(HostfileError, match=message):
        parse_hostfile(text, source="my.txt")


@pytest.mark.parametrize("text", ["\ufeffnode1 slots=1\r\nnode2 slots=1\r\n", "a\r\n", "a\rb\r"])
def test_the_command_in_the_message_makes_the_file_right(text, tmp_path):
    hostfile = tmp_path / "my hosts.txt"
    hostfile.write_bytes(text.encode())
    with pytest.raises(HostfileError) as caught:
        load_hostfile(hostfile)
    command = str(caught.value).partition("run `")[2].rstrip("`")
    subprocess.run(["bash", "-c", command], check=True)
    assert [host.name for host in load_hostfile(hostfile)] == re.findall(r"node[12]|[ab]\b", text)


def test_utf16_is_refused_with_the_command_that_converts_it(tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_bytes("node1 slots=1\r\nnode2 slots=1\r\n".encode("utf-16"))
    with pytest.raises(HostfileError, match="UTF-16") as caught:
        load_hostfile(hostfile)
    command = str(caught.value).partition("run `")[2].partition("`")[0]
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert load_hostfile(tmp_path / "hosts.new") == [Host("node1", 1), Host("node2", 1)]


def test_a_comment_may_be_in_any_encoding(tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_bytes("# Ger\u00e4te\na slots=1\n".encode("latin-1"))
    assert load_hostfile(hostfile) == [Host("a", 1)]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(HostfileError, match=r"nothing\.txt"):
        load_hostfile(tmp_path / "nothing.txt")


def test_the_default_hostfile_names_five_hosts():
    hosts = load_hostfile(Path(__file__).parents[2] / "hosts" / "tesla.txt")
    assert [host.name for host in hosts] == [f"ecetesla{k}" for k in range(5)]
