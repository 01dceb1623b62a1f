"""Adam with SGP on a transformer, small and large batches (Figure 3 of the SGP paper).

The GPT of the examples instead of a translation model, held-out loss instead of BLEU, 8 nodes.
"""

from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.comparison import SCRIPT, compare, figures, middle, seconds
from offbeat.compare import Experiment, parse_methods
from offbeat.compare import Result as Measured

BATCHES = {  # windows of 64 characters for each node and step, and how much faster SGP runs
    "small": (2, 2.0),
    "large": (8, 1.5),
}
HEADINGS = ("batch", "method", "a step", "paper, x AR", "ours, x AR", "held-out loss")
BENCH = Bench(
    name="sgp/adam",
    claim="SGP with Adam on a transformer (Fig. 3)",
    minutes=3,
    full_minutes=20,
    evidence={"Fig. 3": "Faster with Adam on a transformer, and as much progress a step"},
)


def claims(size: str, paper: float, ar: Measured, sgp: Measured) -> list[Claim]:
    faster = seconds(ar) / seconds(sgp)
    theirs, ours = middle(ar.heldout_loss), middle(sgp.heldout_loss)
    then, now = (middle(each.seconds_to_target) for each in (ar, sgp))  # NaN for never
    in_time = ["never" if each != each else f"{each:.1f} s" for each in (now, then)]
    return [
        Claim.effect(f"{size} batch: SGP runs faster", Effect(paper, "x"), Effect(faster, "x")),
        Claim(f"{size} batch: SGP makes slightly more progress per step", "better",
              f"held-out loss {ours:.3f} against {theirs:.3f}", ours < theirs),
        Claim(f"{size} batch: SGP reaches the common loss sooner", "sooner",
              " against ".join(in_time), now < then),
    ]  # fmt: skip


@command(BENCH, "--full", full="Ten times the steps.")
def app(full: bool = False, nodes: int = 8, rate: str = "50mbit", steps: int = 50) -> Result:
    """Train a GPT with Adam on 8 nodes, by all-reduce and by SGP."""
    rows, judged, found = [], [], {}
    steps *= 10 if full else 1
    methods, baseline = parse_methods("ddp,sgp")
    for size, (batch, paper) in BATCHES.items():
        arguments = ("--batch-size", str(batch), "--report-every", str(max(1, steps // 5)))
        experiment = Experiment(SCRIPT, methods, baseline, arguments, steps, rounds=1)
        comparison = compare(experiment, nodes, rate)
        ar, sgp = comparison.results
        for name, result, theirs in (("AR-Adam", ar, 1.0), ("SGP-Adam", sgp, paper)):
            factors = f"{theirs:.1f}", f"{seconds(ar) / seconds(result):.2f}"
            loss = f"{middle(result.heldout_loss):.3f}"
            rows.append((size, name, f"{seconds(result) * 1e3:.0f} ms", *factors, loss))
        judged += claims(size, paper, ar, sgp)
        found[size] = figures(comparison)
    title = f"Figure 3: Adam on a transformer, {nodes} nodes, {rate}"
    return Result(title, HEADINGS, rows, judged, measured=found)
