"""Power and money of nodes, in a TOML file beside the hostfile, such as `hosts/tesla.toml`:

currency = "EUR"
kwh_price = 0.30          # of a kilowatt-hour; optional

[ecetesla0]
watts = 220               # the node's draw while it trains
hour_price = 0.00         # of an hour of the node; optional
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.inputs import decode_text, is_amount, one_line, read_file, shorten

# Of the current directory, then of the checkout.
_HOSTS = (Path("hosts"), Path(__file__).resolve().parents[3] / "hosts")
_NODE_KEYS = ("watts", "hour_price")
_S_PER_HOUR = 3600.0
_MOST_DOTS = 100  # of a line, because tomllib's time grows with their square


@dataclass(frozen=True, kw_only=True)
class NodePrice:
    """Of one node; None where it is not given."""

    watts: float | None = None
    hour_price: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of a cluster's nodes by name."""

    nodes: dict[str, NodePrice]
    currency: str = ""
    kwh_price: float | None = None

    def joules_per_s(self, nodes: Iterable[str]) -> float | None:
        """Power of some nodes together; None where one's is not given."""
        found = [self._of(name).watts for name in nodes]
        return None if None in found else sum(watts for watts in found if watts is not None)

    def money_per_s(self, nodes: Iterable[str]) -> float | None:
        """Cost of some nodes together; None where nothing is given, or not of all."""
        own, kwh, known = [self._of(name) for name in nodes], self.kwh_price, self.nodes.values()
        hours = [one.hour_price for one in own if one.hour_price is not None]
        watts = [one.watts for one in own if one.watts is not None]
        energy = [] if kwh is None else [power / 1000 * kwh for power in watts]
        needs_hours = any(one.hour_price is not None for one in known)
        needs_energy = kwh is not None and any(one.watts is not None for one in known)
        is_whole = len(hours) == len(own) * needs_hours and len(energy) == len(own) * needs_energy
        return sum([*hours, *energy]) / _S_PER_HOUR if is_whole and (hours or energy) else None

    def _of(self, name: str) -> NodePrice:
        return self.nodes.get(name, NodePrice())


def load_prices(path: Path) -> Prices:
    """Read a file of prices.

    Raises:
        ConfigError: missing, no TOML, an unknown key, or a number below 0.
    """
    data = read_file(path, "file of prices", ConfigError, is_given=True)
    text = decode_text(data, str(path))
    dotted = next((line for line in text.split("\n") if line.count(".") > _MOST_DOTS), None)
    if dotted is not None:
        raise ConfigError(f"{path} has {shorten(dotted)}: a name has at most {_MOST_DOTS} dots")
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {one_line(str(error))}") from None
    currency = content.pop("currency", "")
    if not isinstance(currency, str):
        raise ConfigError(f'{path}: currency is {shorten(currency)}: write a name, such as "EUR"')
    kwh = _number(content.pop("kwh_price", None), "kwh_price", path)
    nodes = {name: _node(name, own, path) for name, own in content.items()}
    return Prices(nodes=nodes, currency=one_line(currency, 12), kwh_price=kwh)


def _node(name: str, own: Any, path: Path) -> NodePrice:
    if not isinstance(own, dict) or not set(own) <= set(_NODE_KEYS):
        raise ConfigError(
            f"{path}: {one_line(name, 60)} is not a node with {' and '.join(_NODE_KEYS)}: write "
            'below [HOST], or ["HOST.DOMAIN"] in quotes, these keys'
        )
    return NodePrice(**{key: _number(own.get(key), f"{name}.{key}", path) for key in _NODE_KEYS})


def _number(value: Any, name: str, path: Path) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_amount(value):
        raise ConfigError(f"{path}: {name} is {shorten(value)}: it must be a number of at least 0")
    return float(value)


def find_prices(names: Iterable[str], directories: Iterable[Path] = _HOSTS) -> Prices | None:
    """The first file beside the hostfiles that has all these nodes; None without one.

    Raises:
        ConfigError: a file is malformed.
    """
    wanted = set(names)
    for path in (path for hosts in directories for path in sorted(hosts.glob("*.toml"))):
        found = load_prices(path)
        if wanted <= set(found.nodes):
            return found
    return None
