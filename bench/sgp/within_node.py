"""Seconds per step of SGP on nodes with two ranks each, by the hierarchy of the exchange.

Between ranks of any node, every second exchange sends both models of a node over its link.
``within="local"`` averages gradients inside a node and sends one model.
"""

from bench.harness import Bench, Claim, Result, command
from bench.harness.comparison import beside_torch, figures, rows, seconds

NODES, RANKS = 2, 2
FLAT, LOCAL = "sgp", "sgp(within='local')"
ALGORITHMS = f"ddp,local_sgd(every=8),{FLAT},{LOCAL},sgp(overlap=1)"
HEADINGS = ("method", "a step", "x torch DDP", "sent a step")
BENCH = Bench(
    name="sgp/within_node",
    claim="Averaging inside nodes first makes SGP faster",
    minutes=2,
    full_minutes=8,
)


@command(BENCH, "--full", full="Three rounds, 40 steps.")
def app(full: bool = False, rate: str = "250mbit", steps: int = 16) -> Result:
    """Time SGP on two nodes with two ranks each."""
    steps, rounds = (40, 3) if full else (steps, 1)
    found = beside_torch(ALGORITHMS, NODES, rate, steps, rounds, RANKS)
    took = {result.name: seconds(result) for result in found.results}
    text = f"{LOCAL} is faster than {FLAT} between all ranks"
    ours = f"{took[LOCAL]:.3f} s against {took[FLAT]:.3f} s"
    judged = [Claim(text, "faster", ours, took[LOCAL] < took[FLAT])]
    lines = [(name, step, faster, sent) for name, step, faster, _, sent in rows(found)]
    title = f"A step of a GPT, {NODES} nodes with {RANKS} ranks each, {rate}"
    return Result(title, HEADINGS, lines, judged, measured=figures(found))
