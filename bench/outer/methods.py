"""All methods on one GPT behind slow links: time of a step, bytes, and loss after equal time.

Four nodes with one rank each. The methods take turns in the same processes; a method whose turns
have taken its budget of seconds stops, so that fast ones make more steps.
"""

from bench.harness import Bench, Claim, Result, command
from bench.outer.rounds import Rounds, race

ALONE, DDP = "alone", "ddp"
DILOCO = "diloco(every=8)"
STREAMING = "diloco(every=8,fragments=2,delay=3)"
NARROW = "diloco(every=8,fragments=2,delay=3,wire='int8')"
SPARSE = "sparse_loco(every=8)"
METHODS = (
    DDP,
    "local_sgd(every=8)",
    DILOCO,
    STREAMING,
    NARROW,
    SPARSE,
    "sgp(overlap=1,wire='bf16')",
    "daso(every=8)",
    "lags(density=0.01)",
    ALONE,
)
BENCH = Bench(
    name="outer/methods",
    claim="All methods behind slow links: time, bytes and loss",
    minutes=9,
    full_minutes=27,
)


def rows(found: Rounds) -> list[tuple[str, ...]]:
    """One line for each method."""
    return [
        (
            name, f"{found.step(name):.3f} s", f"{found.ratio(name, ALONE):.2f}",
            f"{found.bytes(name) / 1e6:.2f} MB", f"{found.steps(name):.0f}",
            f"{found.loss_in_time(name):.3f}", f"{found.loss_in_steps(name):.3f}",
        )
        for name in found.names
    ]  # fmt: skip


def claims(found: Rounds) -> list[Claim]:
    """On speed, bytes and losses."""
    over, sent = found.ratio(STREAMING, ALONE), found.bytes(NARROW) / found.bytes(STREAMING)
    ours, theirs = found.loss_in_time(STREAMING), found.loss_in_time(DDP)
    apart = found.loss_in_steps(STREAMING) - found.loss_in_steps(DILOCO)
    return [
        Claim("streaming DiLoCo takes as long as computing alone", "at most 1.05 x",
              f"{over:.2f} x", over <= 1.05),
        Claim("8-bit messages take a quarter of the bytes", "0.254 x", f"{sent:.3f} x", sent < 0.3),
        Claim("SparseLoCo sends a hundredth of the bytes of DiLoCo", "1.5 %",
              f"{100 * found.bytes(SPARSE) / found.bytes(DILOCO):.1f} %",
              found.bytes(SPARSE) < 0.02 * found.bytes(DILOCO)),
        Claim("after equal time streaming DiLoCo has a lower loss than ddp", "lower",
              f"{ours:.3f} against {theirs:.3f}", ours < theirs),
        Claim("after equal steps streaming DiLoCo is as good as DiLoCo", "as good",
              f"{apart:+.3f}", apart <= 0.02),
    ]  # fmt: skip


@command(BENCH, "--seconds 90", full="Three rounds.")
def app(full: bool = False, nodes: int = 4, rate: str = "250mbit", seconds: float = 45) -> Result:
    """Train a GPT under all methods in turns, for the same number of seconds each."""
    found = race(METHODS, seconds, nodes, rate, 3 if full else 1)
    losses = (f"loss after {seconds:g} s", f"after {found.common_steps} steps")
    headings = ("method", "a step", "x alone", "sent a step", "steps", *losses)
    title = f"A GPT, {nodes} nodes, {rate}; steps in {seconds:g} s, held-out losses"
    return Result(title, headings, rows(found), claims(found), found.rounds)
