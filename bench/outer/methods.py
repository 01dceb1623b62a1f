"""All methods train a GPT behind slow links: time of a step, bytes, and loss after equal time."""

from bench.harness import Bench, Claim, Result, at_most, command, less
from bench.outer.rounds import race

ALONE, DDP = "alone", "ddp"
DILOCO = "diloco(every=8)"
STREAMING = "diloco(every=8,fragments=2,delay=3)"
NARROW = "diloco(every=8,fragments=2,delay=3,wire='int8')"
SPARSE = "sparse_loco(every=8)"
METHODS = (
    DDP, "local_sgd(every=8)", DILOCO, STREAMING, NARROW, SPARSE, "sgp(overlap=1,wire='bf16')",
    "daso(every=8)", "lags(density=0.01)", ALONE,
)  # fmt: skip
BENCH = Bench(name="outer/methods", minutes=9, full_minutes=27)


@command(BENCH, "--seconds 90", full={"rounds": 3})
def app(nodes: int = 4, rate: str = "250mbit", seconds: float = 45, rounds: int = 1) -> Result:
    """Train in turns for the same number of seconds each, so that fast ones make more steps."""
    found = race(METHODS, seconds, nodes, rate, rounds)
    rows = [
        (
            name, f"{found.step(name):.3f} s", f"{found.ratio(name, ALONE):.2f}",
            f"{found.bytes(name) / 1e6:.2f} MB", f"{found.steps(name):.0f}",
            f"{found.loss_in_time(name):.3f}", f"{found.loss_in_steps(name):.3f}",
        )
        for name in METHODS
    ]  # fmt: skip
    sent = {name: found.bytes(name) for name in METHODS}
    over, share = found.ratio(STREAMING, ALONE), sent[NARROW] / sent[STREAMING]
    apart = found.loss_in_steps(STREAMING) - found.loss_in_steps(DILOCO)
    claims = [
        at_most("streaming DiLoCo takes as long as computing alone", over, 1.05),
        Claim("8-bit messages take a quarter of the bytes", "0.254 x", f"{share:.3f} x",
              share < 0.3),
        Claim("SparseLoCo sends a hundredth of the bytes of DiLoCo", "1.5 %",
              f"{100 * sent[SPARSE] / sent[DILOCO]:.1f} %", sent[SPARSE] < 0.02 * sent[DILOCO]),
        less("after equal time streaming DiLoCo has a lower loss than ddp",
             found.loss_in_time(STREAMING), found.loss_in_time(DDP)),
        Claim("after equal steps streaming DiLoCo is as good as DiLoCo", "as good",
              f"{apart:+.3f}", apart <= 0.02),
    ]  # fmt: skip
    losses = (f"loss after {seconds:g} s", f"after {found.common_steps} steps")
    headings = ("method", "a step", "x alone", "sent a step", "steps", *losses)
    title = f"A GPT, {nodes} nodes, {rate}; steps in {seconds:g} s, held-out losses"
    return Result(title, headings, rows, claims, found.rounds)
