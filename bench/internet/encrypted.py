"""Encrypted links carry nearly what plain ones do."""

from statistics import fmean

from bench.harness import GOAL, Bench, Result, at_least, command
from offbeat.lab import Lab
from offbeat.lab.check import measure_links

RATES, TURNS = ("100mbit", "250mbit"), 3
HEADINGS = ("rate", "plain", "encrypted", "share")
BENCH = Bench(name="internet/encrypted", minutes=2)


def throughput(rate: str, *, encrypt: bool) -> float:
    """Mbit/s of payload by Gloo between two nodes, in both directions at once."""
    with Lab(2, 1, rate, encrypt=encrypt) as runner:
        return measure_links(runner).both_ways_mbit


@command(BENCH)
def app() -> Result:
    """Measure plain and encrypted links in turn."""
    rows, shares = [], []
    for rate in RATES:
        turns = [[throughput(rate, encrypt=on) for on in (False, True)] for _ in range(TURNS)]
        plain, encrypted = map(fmean, zip(*turns, strict=True))
        shares.append(encrypted / plain)
        rows.append((rate, f"{plain:.1f} Mbit/s", f"{encrypted:.1f} Mbit/s", f"{shares[-1]:.0%}"))
    claims = [at_least("share of the throughput of plain links", min(shares), 0.9, "{:.2f}",
                       "(the least)", GOAL)]  # fmt: skip
    return Result("Gloo between two nodes of the lab", HEADINGS, rows, claims)
