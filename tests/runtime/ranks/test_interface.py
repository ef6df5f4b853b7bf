"""What limits an interface."""

from harness.runtime.ranks.interface import shaped_rates


def test_a_shaper_at_the_root_limits_its_interface():
    qdiscs = [
        {"kind": "noqueue", "dev": "lo", "root": True, "options": {}},
        {"kind": "tbf", "dev": "eth0", "root": True, "options": {"rate": 12500000}},
        {"kind": "tbf", "dev": "eth1", "parent": "1:1", "options": {"rate": 1}},
    ]
    assert shaped_rates(qdiscs) == {"eth0": 100e6}
