"""All links of a network: those of the nodes, and those between sites."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, final

from offbeat.lab.network.wire import Wire, parse_jitter, parse_latency, parse_loss, parse_rate

Pair = tuple[int, int]  # of sites, the smaller number first
_PLAIN = Wire()
MAX_SITES = 16  # every pair has a link
_SITES = "the nodes of at least two sites; for example --sites 4,4,6"
_BETWEEN = "[SITE-SITE:]LATENCY[@RATE], for example 60ms@200mbit or 0-2:75ms@100mbit"


class LinkOptions(TypedDict, total=False):
    """The options of :meth:`Links.parse` beside the rate, with their default None, () or False."""

    up: str | None
    down: str | None
    latency: str | None
    jitter: str | None
    loss: str | None
    sites: Sequence[int]
    between: Sequence[str]
    encrypt: bool


@final
@dataclass(frozen=True)
class Links:
    """The links of a network: what every node sends and receives by, and those between sites.

    Without sites, all nodes reach one switch. ``down`` then has the latency, jitter and loss of
    the whole way from one node to another. With sites, ``far`` holds the link of each pair, equal
    in both directions, which all their nodes share. ``encrypt``: nodes talk through WireGuard.

    >>> print(Links.parse("100mbit", latency="50ms"))
    100 Mbit/s, 50 ms one way
    >>> print(Links.parse(up="20mbit", sites=(1, 2), between=["60ms@200mbit"]))
    20 Mbit/s up, no rate limit down; sites of 1, 2 nodes, 200 Mbit/s, 60 ms one way
    """

    up: Wire = _PLAIN
    down: Wire = _PLAIN
    sites: tuple[int, ...] = ()
    far: Mapping[Pair, Wire] = field(default_factory=dict)
    encrypt: bool = False

    @classmethod
    def parse(
        cls,
        rate: str | None = None,
        *,
        up: str | None = None,
        down: str | None = None,
        latency: str | None = None,
        jitter: str | None = None,
        loss: str | None = None,
        sites: Sequence[int] = (),
        between: Sequence[str] = (),
        encrypt: bool = False,
    ) -> "Links":
        """Parse the options of the command line; ``up`` and ``down`` take precedence over ``rate``.

        Raises ValueError for text that is not a quantity, for jitter or loss without a latency,
        for sites without links or links without sites, and for a latency of nodes with sites.
        """
        both = parse_rate(rate)
        near = Wire(parse_rate(up, "up") or both), Wire(parse_rate(down, "down") or both)
        if latency is None and not sites and (jitter is not None or loss is not None):
            raise ValueError(
                "jitter and loss: expected a latency, or sites, whose links they apply to; for "
                "example --latency 50ms"
            )
        if not sites and not between:
            way = 0.0 if latency is None else parse_latency(latency)
            wire = replace(near[1], latency=way, jitter=parse_jitter(jitter, way))
            return cls(near[0], replace(wire, loss=parse_loss(loss)), encrypt=encrypt)
        if latency is not None:
            raise ValueError(
                f"latency: got {latency!r} with sites, whose nodes are near each other; the "
                f"latency between sites is that of --between: {_BETWEEN}"
            )
        far = _parse_between(between, sites)
        shortest = min(wire.latency for wire in far.values())
        varied, lost = parse_jitter(jitter, shortest), parse_loss(loss)
        shared = {pair: replace(wire, jitter=varied, loss=lost) for pair, wire in far.items()}
        return cls(*near, tuple(sites), shared, encrypt)

    @property
    def wires(self) -> list[Wire]:
        """Every direction of every link."""
        return [self.up, self.down, *self.far.values()]

    @property
    def round_trip(self) -> float:
        """The seconds of the longest way there and back."""
        return 2 * max(wire.latency for wire in self.wires)

    @property
    def delays(self) -> bool:
        """Whether any has latency or loss."""
        return any(wire.delays for wire in self.wires)

    @property
    def limited(self) -> bool:
        """Whether they differ from a local network in anything."""
        return bool(self.sites) or self.encrypt or any(wire != _PLAIN for wire in self.wires)

    def wires_between(self, node: int, other: int) -> list[Wire]:
        """Return what packets from one node to another pass."""
        pair = sorted((self.site_of(node), self.site_of(other)))
        return [self.up, *filter(None, [self.far.get((pair[0], pair[1]))]), self.down]

    def require_nodes(self, nodes: int) -> None:
        """Raise ValueError if the sites have another number of nodes together."""
        if self.sites and sum(self.sites) != nodes:
            raise ValueError(
                f"sites: got {_listed(self.sites)}, {sum(self.sites)} nodes together, for {nodes} "
                "nodes; omit the number of nodes, or make them agree"
            )

    def site_of(self, node: int) -> int:
        """Return the site of a node; 0 without sites."""
        ends = itertools.accumulate(self.sites)
        return next((site for site, end in enumerate(ends) if node < end), 0)

    def nodes_of(self, site: int) -> range:
        """Return the nodes of a site."""
        first = sum(self.sites[:site])
        return range(first, first + self.sites[site])

    def __str__(self) -> str:
        near = str(self.down)
        if self.up.rate != self.down.rate:
            rate, *delays = near.split(", ")
            near = ", ".join([f"{Wire(self.up.rate)} up", f"{rate} down", *delays])
        near += ", encrypted" if self.encrypt else ""
        if not self.sites:
            return near
        kinds = dict.fromkeys(map(str, self.far.values()))
        return f"{near}; sites of {_listed(self.sites, ', ')} nodes, {'; '.join(kinds)}"


def _parse_between(texts: Sequence[str], sites: Sequence[int]) -> dict[Pair, Wire]:
    """Return the wire of every pair: its own if one names it, else the one without a pair."""
    if not 2 <= len(sites) <= MAX_SITES or min(sites) < 1:
        raise ValueError(
            f"sites: got {_listed(sites) or 'none'}, expected {_SITES} (at most {MAX_SITES} sites)"
        )
    given = [_parse_wire(text) for text in texts]
    pairs = list(itertools.combinations(range(len(sites)), 2))
    for pair, wire in given:
        if pair is not None and pair not in pairs:
            raise ValueError(
                f"between: got the sites {pair[0]} and {pair[1]}, expected two different ones of 0 "
                f"to {len(sites) - 1}"
            )
        if [other for other, _ in given].count(pair) > 1:
            which = "all pairs" if pair is None else f"the sites {pair[0]} and {pair[1]}"
            raise ValueError(f"between: got {which} twice, the last with {wire}; give each once")
    wires = dict(given)
    missing = [pair for pair in pairs if pair not in wires and None not in wires]
    if missing:
        raise ValueError(
            f"between: got nothing for the sites {missing[0][0]} and {missing[0][1]}, expected "
            f"{_BETWEEN}; one without sites applies to all other pairs"
        )
    return {pair: wires.get(pair) or wires[None] for pair in pairs}


def _parse_wire(text: str) -> tuple[Pair | None, Wire]:
    """Parse one [SITE-SITE:]LATENCY[@RATE]."""
    match = re.fullmatch(r"(?:(\d+)-(\d+):)?([^@:]+)(?:@(.+))?", text.strip())
    if match is None:
        raise ValueError(f"between: got {text!r}, expected {_BETWEEN}")
    first, second, latency, rate = match.groups()
    pair = None if first is None else (min(a := int(first), b := int(second)), max(a, b))
    return pair, Wire(parse_rate(rate), parse_latency(latency))


def _listed(numbers: Iterable[int], separator: str = ",") -> str:
    return separator.join(map(str, numbers))
