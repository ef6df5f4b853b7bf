"""The checks look at the interface that runs take, which need not be that of the hosts' names."""

from harness.nodes.between import choose_run_interfaces
from harness.nodes.facts import Facts, InterfaceFacts, PeerRoute, Status
from harness.nodes.mpi import common_networks
from harness.nodes.parse import parse_facts


def _host(index):
    """Its name's address stands on eth0; a faster network is beside it."""
    return Facts(
        hostname=f"n{index}",
        interfaces=(
            InterfaceFacts(name="lo", networks=("127.0.0.1/8",)),
            InterfaceFacts(name="eth0", networks=(f"10.0.0.{index}/24",), claimed_mbit_per_s=1000),
            InterfaceFacts(name="ib0", networks=(f"10.1.0.{index}/24",), claimed_mbit_per_s=40000),
            InterfaceFacts(name="docker0", networks=("172.17.0.1/16",), claimed_mbit_per_s=10**5),
        ),
        routes=(PeerRoute(address="10.0.0.99", interface="eth0", source=f"10.0.0.{index}"),),
    )


def test_the_fastest_network_that_all_share_is_looked_at_as_runs_take_it(tmp_path):
    settled = choose_run_interfaces({"a": _host(1), "b": _host(2)}, str(tmp_path))
    taken = [(facts.cluster_interface.name, facts.cluster_address) for facts in settled.values()]
    assert taken == [("ib0", "10.1.0.1"), ("ib0", "10.1.0.2")]
    assert common_networks(settled) == ["10.1.0.0/24", "10.0.0.0/24"]  # and that of the names


def test_settings_of_runs_choose_the_interface(tmp_path):
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "n1.env").write_text("NCCL_DEBUG=INFO\nGLOO_SOCKET_IFNAME=eth0\n")
    settled = choose_run_interfaces({"a": _host(1), "b": _host(2)}, str(tmp_path))
    assert [facts.run_interface for facts in settled.values()] == ["eth0", "ib0"]
    (tmp_path / "hosts" / "n2.env").write_text("GLOO_SOCKET_IFNAME=none0\n")
    settled = choose_run_interfaces({"a": _host(1), "b": _host(2)}, str(tmp_path))
    assert [facts.run_interface for facts in settled.values()] == ["eth0", ""]


def test_hosts_without_a_route_to_the_others_names_stay_critical(hosts):
    cluster = hosts(2)
    settled = choose_run_interfaces({r.name: r.facts for r in cluster.reports}, "/none")
    assert settled["n1"].run_interface == "eth0"
    cluster.facts(1, run_interface="eth0", run_address="10.0.0.2", routes=())
    assert cluster.judge("nic", 1)[0].status is Status.CRITICAL


def test_an_interface_without_a_carrier_is_not_taken():
    text = """@harness:net_dev
  eth0: 0
@harness:links
2: eth0: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc mq state DOWN
@harness:addresses
2: eth0    inet 10.0.0.2/24 scope global eth0
"""
    settled = choose_run_interfaces({"a": parse_facts(text), "b": _host(1)}, "/none")
    assert settled["a"].run_interface == ""
