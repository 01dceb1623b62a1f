"""SGP is faster where gradients are averaged inside nodes first, which then send one model."""

from bench.harness import Bench, Result, command, less
from bench.harness.comparison import beside_torch, rows, seconds

FLAT, LOCAL = "sgp", "sgp(within='local')"
ALGORITHMS = f"ddp,local_sgd(every=8),{FLAT},{LOCAL},sgp(overlap=1)"
HEADINGS = ("method", "a step", "x torch DDP", "sent a step")
BENCH = Bench(name="sgp/within_node", minutes=2, full_minutes=8)


@command(BENCH, "--full", full={"steps": 40, "rounds": 3})
def app(rate: str = "250mbit", steps: int = 16, rounds: int = 1) -> Result:
    """Time SGP on two nodes with two ranks each."""
    found = beside_torch(ALGORITHMS, 2, rate, steps, rounds, 2)
    took = {result.name: seconds(result) for result in found.results}
    text = f"{LOCAL} is faster than {FLAT} between all ranks"
    claims = [less(text, took[LOCAL], took[FLAT], "{:.3f} s", "faster")]
    lines = [(name, step, faster, sent) for name, step, faster, _, sent in rows(found)]
    title = f"A step of a GPT, 2 nodes with 2 ranks each, {rate}"
    return Result(title, HEADINGS, lines, claims)
