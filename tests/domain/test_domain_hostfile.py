"""Hostfiles are data: what could be a shell's or ssh's syntax is refused."""

import pytest

from harness.domain.hostfile import Host, load_hostfile, parse_hostfile
from harness.errors import HostfileError


def test_hosts_slots_and_comments():
    text = "# head\necetesla0 slots=2  # two GPUs\n\n10.0.0.7\nn2 slots=1 max_slots=4\n"
    assert parse_hostfile(text) == [Host("ecetesla0", 2), Host("10.0.0.7"), Host("n2", 1)]


def test_blanks_around_the_sign_are_as_open_mpi_takes_them():
    assert parse_hostfile("a slots = 2\nb slots =3\n") == [Host("a", 2), Host("b", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("a\na\n", "listed twice"),
        ("a slots=0\n", "above 0"),
        ("a slots=two\n", "above 0"),
        ("a gpus=2\n", "unknown option"),
        ("a;reboot\n", "not a host name"),
        ("-oProxyCommand=evil\n", "not a host name"),
        ("$(id)\n", "not a host name"),
        ("root@a\n", "not a host name"),
        ("a:2\n", "not a host name"),
        ("fe80::1 slots=1\n", "fe80::1 is an IPv6 address"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(text, message):
    with pytest.raises(HostfileError, match=message):
        parse_hostfile(text, source="hosts.txt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(HostfileError, match=r"nothing\.txt"):
        load_hostfile(tmp_path / "nothing.txt")


def test_the_default_hostfile_names_five_hosts():
    from pathlib import Path

    hosts = load_hostfile(Path(__file__).parents[2] / "hosts" / "tesla.txt")
    assert [host.name for host in hosts] == [f"ecetesla{k}" for k in range(5)]
