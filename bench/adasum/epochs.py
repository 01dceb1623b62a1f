"""Epochs and time to a target accuracy (Table 4, Figure 3 of the Adasum paper).

LeNet-5 on 8,000 real digits, four nodes. A rank's batch is 16 images, or eight times that. The
learning rate is multiplied by the micro-batches of a step, and with an all-reduce by the number of
ranks too, as in the paper; nothing is tuned for the large batch.
"""

from bench.adasum.mnist import real_or_exit
from bench.adasum.to_target import NODES, Run, train_all
from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.ranks import on_nodes

TIMES = 8  # the small batch
BENCH = Bench(
    name="adasum/epochs",
    claim="Adasum converges at 8 x the batch (Table 4)",
    minutes=3,
    evidence={"Table 4, Fig. 3": "Converges at 8 times the batch, where an all-reduce does not"},
)


def claims(small: Run, small_adasum: Run, large: Run, adasum: Run) -> list[Claim]:
    took = small.took, small_adasum.took
    near = None not in took and abs(took[0] - took[1]) <= 1
    sooner = small_adasum.seconds / adasum.seconds if adasum.took else 0.0
    return [
        Claim("small batch: both need about the same number of epochs", "62 and 62",
              " and ".join(f"{each or 'never'}" for each in took), near),
        Claim("8 x the batch: all-reduce does not reach the target", "never in 120",
              f"{large.took or 'never'}", large.took is None),
        Claim("8 x the batch: Adasum reaches it", "69, for 62 with the small one",
              f"{adasum.took or 'never'}", adasum.took is not None),
        Claim.effect("Adasum reaches it sooner with the large batch", Effect(2.3, "x"),
                     Effect(sooner, "x")),
    ]  # fmt: skip


@command(
    BENCH, "--lr 0.005", lr="Of one rank's batch of 16.", target="Accuracy on held-out digits, %.",
    epochs="After which a run ends without reaching it.",
)  # fmt: skip
def app(lr: float = 0.01, target: float = 96.0, epochs: int = 20, rate: str = "250mbit") -> Result:
    """Train LeNet-5 to a target accuracy with a small and an eight times larger batch."""
    real_or_exit(BENCH)  # fetched before the ranks read it: their nodes have no way out
    wanted = [(method, times) for times in (1, TIMES) for method in ("ddp", "adasum")]
    runs = [Run(*each, lr, target, epochs) for each in wanted]
    found: list[Run] = on_nodes(train_all, runs, NODES, rate=rate)
    headings = ("method", "batch", f"epochs to {target:.1f}%", "an epoch", "time", "best")
    title = f"LeNet-5 on {NODES} nodes, {rate}"
    return Result(title, headings, [run.row for run in found], claims(*found), raw=found)
