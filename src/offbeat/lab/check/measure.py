"""The throughput of Gloo over the links, beside what the links do to packets."""

import json
import math
from typing import NamedTuple

from offbeat.lab.check import gloo_probe
from offbeat.lab.check.measurements import LinkMeasurements
from offbeat.lab.check.paths import measure_paths, run_probe
from offbeat.lab.cluster import Cluster
from offbeat.lab.network.links import Links
from offbeat.lab.runner import Runner

_SECONDS = 0.3  # duration of one transfer
_UNLIMITED_SIZE = 2**26  # bytes of one transfer where there is no rate
_TRIPS = 8  # round trips that a transfer takes at least, until TCP has reached the rate


def require_two_nodes(cluster: Cluster) -> None:
    """Raise ValueError for a cluster of one node, which has no links to measure."""
    if cluster.nodes < 2:
        raise ValueError(f"check: got {cluster.nodes} node, expected at least 2; for example 4")


class _Effort(NamedTuple):
    """What Gloo transfers, and how often."""

    size: int  # bytes of one transfer
    repeats: int
    round_trips: int

    @classmethod
    def of(cls, links: Links, rate: float | None) -> "_Effort":
        """Choose so that far links take half a minute."""
        seconds = max(_SECONDS, _TRIPS * links.round_trip)
        rate = min(rate or math.inf, _lossy_rate(links))
        size = _UNLIMITED_SIZE if rate == math.inf else round(rate / 8 * seconds)
        size = max(1, round(size / gloo_probe.PIECE)) * gloo_probe.PIECE
        return cls(size, 1, 20) if links.delays else cls(size, 3, 50)


def measure_links(runner: Runner) -> LinkMeasurements:
    """Measure the links of ``runner``, which must have been entered.

    Takes a few seconds, or with latency half a minute. Raises ValueError for a cluster of one
    node, and RuntimeError with the output of the ranks if a rank fails.
    """
    cluster, links = runner.cluster, runner.links
    require_two_nodes(cluster)
    before = runner.delay_line_usage()
    paths = measure_paths(runner) if links.delays or links.up.rate != links.down.rate else []
    after = runner.delay_line_usage()
    first = [links.nodes_of(site)[0] for site in range(len(links.sites))]
    order = [*first, *(node for node in range(cluster.nodes) if node not in first)]
    leaders = [cluster.leaders[node] for node in order]
    limits = [wire.rate for wire in links.wires_between(*order[:2]) if wire.rate is not None]
    rate = min(limits, default=None)
    effort = _Effort.of(links, rate)
    (seconds,) = run_probe(runner, [gloo_probe.__file__, *map(str, effort), json.dumps(leaders)])
    megabits = effort.size * 8 / 1e6
    inside = seconds.get("inside_node")
    return LinkMeasurements(
        nodes=cluster.nodes,
        rate_mbit=None if rate is None else rate / 1e6,
        one_way_mbit=megabits / seconds["one_way"],
        both_ways_mbit=megabits / seconds["both_ways"],
        all_reduce_mbit=megabits / seconds["all_reduce"] * 2 * (cluster.nodes - 1) / cluster.nodes,
        round_trip_ms=seconds["round_trip"] * 1e3,
        inside_node_mbit=None if inside is None else megabits / inside,
        paths=tuple(paths),
        delay_line_cores=None if before is None or after is None else after.since(before).cores,
    )


def _lossy_rate(links: Links) -> float:
    r"""Return about what one TCP connection carries with random loss, bit/s.

    .. math:: \frac{MSS}{RTT} \sqrt{\frac{3}{2 p}}

    (Mathis et al. 1997), for the probability of loss p.
    """
    loss = max(wire.loss for wire in links.wires)
    return 8 * 1448 / links.round_trip * math.sqrt(1.5 / loss) if loss else math.inf
