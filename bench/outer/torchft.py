"""DiLoCo and Local SGD of this library beside those of torchft, behind slow links.

Four nodes with one rank each, all methods in turns in the same processes. Every rank of torchft is
a replica group of its own, with a manager; rank 0 hosts the lighthouse.
"""

from importlib.util import find_spec

from bench.harness import Bench, Claim, Result, command, console
from bench.outer.rounds import Rounds, race

ALONE, DDP, DILOCO, LOCAL = "alone", "ddp", "diloco(every=8)", "local_sgd(every=8)"
STREAMING = "diloco(every=8,fragments=2,delay=3)"
PACKED = "torchft DiLoCo(8), one message"
THEIRS = {  # those of torchft, with ours
    "torchft DDP": DDP,
    "torchft LocalSGD(8)": LOCAL,
    "torchft DiLoCo(8)": DILOCO,
    PACKED: DILOCO,
    "torchft DiLoCo(8), 2 fragments, delay 3": STREAMING,
}
OURS = ("torch-ddp", DDP, LOCAL, DILOCO, STREAMING, ALONE)
MISSING = (
    "torchft is not installed: its rows are left out. Install it into a folder of its own, and add "
    "the folder to PYTHONPATH:\n"
    "pip install --no-deps --target FOLDER torchft-nightly==2026.10.26\n"
    "pip install --target FOLDER opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
)
BENCH = Bench(
    name="outer/torchft",
    claim="DiLoCo and Local SGD beside those of torchft",
    minutes=8,
    full_minutes=24,
)


def rows(found: Rounds) -> list[tuple[str, ...]]:
    """One line for each method."""
    return [
        (
            name, f"{found.step(name):.3f} s", f"{found.ratio(name, ALONE):.2f}",
            f"{found.ratio(name, THEIRS[name]):.2f}" if name in THEIRS else "",
            f"{found.bytes(name) / 1e6:.2f} MB", f"{found.loss_in_steps(name):.3f}",
        )
        for name in found.names
    ]  # fmt: skip


def claims(found: Rounds) -> list[Claim]:
    """On speed, and that both learn alike."""
    over = found.ratio(STREAMING, ALONE)
    made = [
        Claim("streaming DiLoCo takes as long as computing alone", "at most 1.05 x",
              f"{over:.2f} x", over <= 1.05)
    ]  # fmt: skip
    for theirs, ours in THEIRS.items():
        if theirs not in found.names:
            continue
        ratio = found.ratio(ours, theirs)
        made.append(Claim(f"{ours} is no slower than {theirs}", "at most 1.00 x", f"{ratio:.2f} x",
                          ratio <= 1.0))  # fmt: skip
        if "delay" not in theirs:  # its schedule and its fragments are others
            apart = found.loss_in_steps(ours) - found.loss_in_steps(theirs)
            made.append(Claim(f"{ours} and {theirs} learn alike", "within 0.05", f"{apart:+.3f}",
                              abs(apart) <= 0.05))  # fmt: skip
    return made


@command(BENCH, "--seconds 60", full="Three rounds.")
def app(full: bool = False, nodes: int = 4, rate: str = "250mbit", seconds: float = 35) -> Result:
    """Train a GPT with this library and with torchft, in turns."""
    is_there = find_spec("torchft") is not None
    if not is_there:
        console.print(MISSING, markup=False)
    methods = (*(THEIRS if is_there else ()), *OURS)
    found = race(methods, seconds, nodes, rate, 3 if full else 1)
    headings = ("method", "a step", "x alone", "x ours", "sent a step",
                f"loss after {found.common_steps} steps")  # fmt: skip
    title = f"A GPT, {nodes} nodes, {rate}; held-out losses"
    return Result(title, headings, rows(found), claims(found), found.rounds)
