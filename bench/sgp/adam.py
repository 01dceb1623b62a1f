"""Faster with Adam on a transformer, and as much progress a step."""

from bench.harness import Bench, Claim, Effect, Result, command, less
from bench.harness.comparison import SCRIPT, compare, middle, seconds
from offbeat.compare import Experiment, parse_methods

BATCHES = {"small": (2, 2.0), "large": (8, 1.5)}  # windows of a node and step; the paper's factor
HEADINGS = ("batch", "method", "a step", "paper, x AR", "ours, x AR", "held-out loss")
BENCH = Bench(name="sgp/adam", minutes=3, full_minutes=20, evidence="Fig. 3")


@command(BENCH, "--full", full={"steps": 500})
def app(nodes: int = 8, rate: str = "50mbit", steps: int = 50) -> Result:
    """Train a GPT with Adam on 8 nodes, by all-reduce and by SGP."""
    rows, claims = [], []
    for size, (batch, paper) in BATCHES.items():
        arguments = ("--batch-size", str(batch), "--report-every", str(max(1, steps // 5)))
        experiment = Experiment(SCRIPT, *parse_methods("ddp,sgp"), arguments, steps, rounds=1)
        comparison = compare(experiment, nodes, rate)
        ar, sgp = comparison.results
        losses = [middle(each.heldout_loss) for each in (sgp, ar)]
        until = [middle(each.seconds_to_target) for each in (sgp, ar)]  # NaN for never
        faster, text = seconds(ar) / seconds(sgp), f"{size} batch: SGP"
        claims += [
            Claim.effect(f"{text} runs faster", Effect(paper, "x"), Effect(faster, "x")),
            Claim(f"{text} makes slightly more progress per step", "better",
                  "held-out loss {:.3f} against {:.3f}".format(*losses), losses[0] < losses[1]),
            less(f"{text} reaches the common loss sooner", *until, "{:.1f} s", "sooner"),
        ]  # fmt: skip
        for name, each, *factors, loss in (
            ("AR-Adam", ar, "1.0", "1.00", losses[1]),
            ("SGP-Adam", sgp, f"{paper:.1f}", f"{faster:.2f}", losses[0]),
        ):
            rows.append((size, name, f"{seconds(each) * 1e3:.0f} ms", *factors, f"{loss:.3f}"))
    title = f"Figure 3: Adam on a transformer, {nodes} nodes, {rate}"
    return Result(title, HEADINGS, rows, claims)
