"""What measured links mean for training, and which methods suffer."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from offbeat.doctor.finding import Finding
from offbeat.doctor.probe import Link
from offbeat.kit import quantity

SLOWER = 3.0  # times: a rank that is slower than the others
SLOW = 1000.0  # Mbit/s, below which a model often travels for longer than a step
FAR = 10.0  # ms of a round trip
APART = 1000.0  # ms between clocks

_WAITING = (
    "ddp, lags, adasum, local_sgd, diloco and daso wait for it in every exchange, sgp and d_psgd "
    "when it is their peer; ad_psgd does not wait. Mend the link, exchange less often, such as by "
    "diloco(every=100), or leave the rank out"
)
_SLOW = (
    "ddp and adasum suffer, which send a model in every step; lags(density=0.01) sends less, "
    "sgp(overlap=1, wire='bf16') half, behind the next step, and local_sgd and diloco exchange "
    "every few steps: see offbeat plan --rate {rate:.0f}mbit"
)
_FAR = (
    "ddp, lags and adasum suffer, which wait for several messages in every step, and local_sgd a "
    "little; sgp(overlap=1) and diloco(delay=...) send behind training. Rare messages pass "
    "sooner after sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on every node. Where packets are "
    "lost, replicate(connections=8) divides messages: offbeat plan --loss 0.1% --connections 8 "
    "predicts its gain"
)


def diagnose(links: Sequence[Link], ports: str) -> Iterator[Finding]:
    """Return the findings of all links; ``ports`` are those that ranks listen on."""
    works = [link for link in links if not link.error]
    yield from _blocked([link for link in links if link.error], works, ports)
    if works:
        yield from _rates(works)
        yield _round_trips(works)
        yield _clocks(works)


def _blocked(broken: Sequence[Link], works: Sequence[Link], ports: str) -> Iterator[Finding]:
    ways = {(link.source, link.target) for link in works}
    for link in broken:
        back = "" if (link.target, link.source) not in ways else "; the other direction works"
        yield Finding(
            "connection",
            "error",
            f"rank {link.source} cannot connect to rank {link.target} at {link.error}{back}",
            f"every method fails: allow TCP connections from the node of rank {link.source} to the "
            f"node of rank {link.target} on ports {ports}, or set GLOO_SOCKET_IFNAME to the "
            "interface that leads there",
        )


def _rates(links: Sequence[Link]) -> Iterator[Finding]:
    """Name ranks whose best link is much slower than that of others, per direction."""
    slow = False
    rates = {
        "sends": _best({link: link.source for link in links}),
        "receives": _best({link: link.target for link in links}),
    }
    for verb, best in rates.items():
        usual = median(best.values())
        for rank, mbit in sorted(best.items()):
            if mbit * SLOWER < usual:
                slow = True
                text = f"rank {rank} {verb} {_rate(mbit)}, others {_rate(usual)}"
                yield Finding("rate", "warning", text, _WAITING)
    usual = median(mbit for best in rates.values() for mbit in best.values())
    text = f"ranks send and receive {_rate(usual)} in the median, all at once"
    if usual < SLOW:
        yield Finding("rate", "warning", text, _SLOW.format(rate=usual))
    elif not slow:
        yield Finding("rate", "ok", text)


def _best(ranks: dict[Link, int]) -> dict[int, float]:
    best: dict[int, float] = defaultdict(float)
    for link, rank in ranks.items():
        best[rank] = max(best[rank], link.mbit)
    return best


def _round_trips(links: Sequence[Link]) -> Finding:
    worst = max(links, key=lambda link: link.round_trip_ms)
    text = (
        f"at most {quantity.seconds(worst.round_trip_ms / 1e3)}, between ranks {worst.source} and "
        f"{worst.target}"
    )
    far = worst.round_trip_ms > FAR
    return Finding("round trip", "warning" if far else "ok", text, _FAR if far else "")


def _clocks(links: Sequence[Link]) -> Finding:
    worst = max(links, key=lambda link: abs(link.ahead_ms))
    text = f"at most {quantity.seconds(abs(worst.ahead_ms) / 1e3)} apart"
    if abs(worst.ahead_ms) < APART:
        return Finding("clocks", "ok", text)
    fix = "no method suffers; recordings and logs of ranks do not line up: start chrony or ntpd"
    return Finding("clocks", "warning", f"{text}: ranks {worst.source} and {worst.target}", fix)


def _rate(mbit: float) -> str:
    return quantity.rate(int(float(f"{mbit * 1e6:.3g}")))
