"""The NIC that reaches every other host, among those that do not."""

from harness.domain.interface import Interface, choose_interface

LO = Interface(name="lo", address="127.0.0.1", prefix_length=8)
DOCKER = Interface(name="docker0", address="172.17.0.1", prefix_length=16, speed_bits_per_s=1e10)


def ethernet(host, subnet="10.0.0", name="eth0", speed=1e9, prefix=24):
    return Interface(
        name=name, address=f"{subnet}.{host}", prefix_length=prefix, speed_bits_per_s=speed
    )


def test_ranks_on_one_host_use_loopback():
    chosen = choose_interface(0, ["a", "a"], [[LO, ethernet(1)], [LO, ethernet(1)]])
    assert chosen == LO


def test_docker0_with_the_same_address_everywhere_is_passed_over_though_faster():
    hosts = [[LO, DOCKER, ethernet(k)] for k in (1, 2, 3)]
    for rank in range(3):
        chosen = choose_interface(rank, ["a", "b", "c"], hosts)
        assert chosen is not None
        assert chosen.name == "eth0"


def test_the_faster_of_two_shared_networks_wins():
    hosts = [[LO, ethernet(k), ethernet(k, "10.1.0", name="ib0", speed=1e11)] for k in (1, 2)]
    chosen = choose_interface(1, ["a", "b"], hosts)
    assert chosen is not None
    assert chosen.name == "ib0"


def test_a_network_that_one_host_lacks_does_not_count():
    fast = [ethernet(k, "10.1.0", name="ib0", speed=1e11) for k in (1, 2)]
    hosts = [[ethernet(1), fast[0]], [ethernet(2), fast[1]], [ethernet(3)]]
    chosen = choose_interface(0, ["a", "b", "c"], hosts)
    assert chosen is not None
    assert chosen.name == "eth0"


def test_routed_hosts_share_no_subnet_and_still_find_one():
    hosts = [[LO, DOCKER, ethernet(1, "10.0.1")], [LO, DOCKER, ethernet(1, "10.0.2")]]
    chosen = choose_interface(0, ["a", "b"], hosts)
    assert chosen is not None
    assert chosen.address == "10.0.1.1"


def test_the_users_choice_wins_and_a_missing_one_is_none():
    hosts = [[LO, ethernet(1), DOCKER], [LO, ethernet(2), DOCKER]]
    assert choose_interface(0, ["a", "b"], hosts, "docker0") == DOCKER
    assert choose_interface(0, ["a", "b"], hosts, "eth9") is None


def test_loopback_is_taken_on_one_host_only():
    assert choose_interface(0, ["a", "a"], [[LO], [LO]], "lo") == LO
    assert choose_interface(0, ["a", "b"], [[LO, ethernet(1)], [LO, ethernet(2)]], "lo") is None
