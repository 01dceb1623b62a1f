"""DiLoCo and Local SGD are no slower than those of torchft behind slow links, and learn alike."""

from importlib.util import find_spec

from bench.harness import Bench, Claim, Result, at_most, command, console
from bench.outer.rounds import race

ALONE, DDP, DILOCO, LOCAL = "alone", "ddp", "diloco(every=8)", "local_sgd(every=8)"
STREAMING = "diloco(every=8,fragments=2,delay=3)"
THEIRS = {  # those of torchft, with ours
    "torchft DDP": DDP,
    "torchft LocalSGD(8)": LOCAL,
    "torchft DiLoCo(8)": DILOCO,
    "torchft DiLoCo(8), one message": DILOCO,
    "torchft DiLoCo(8), 2 fragments, delay 3": STREAMING,
}
OURS = ("torch-ddp", DDP, LOCAL, DILOCO, STREAMING, ALONE)
MISSING = (
    "torchft is not installed: its rows are left out. Install it into a folder of its own, and add "
    "the folder to PYTHONPATH:\n"
    "pip install --no-deps --target FOLDER torchft-nightly==2026.10.26\n"
    "pip install --target FOLDER opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
)
BENCH = Bench(name="outer/torchft", minutes=8, full_minutes=24)


@command(BENCH, "--seconds 60", full={"rounds": 3})
def app(nodes: int = 4, rate: str = "250mbit", seconds: float = 35, rounds: int = 1) -> Result:
    """Train a GPT with this library and with torchft, in turns."""
    theirs = THEIRS
    if find_spec("torchft") is None:
        console.print(MISSING, markup=False)
        theirs = {}
    methods = (*theirs, *OURS)
    found = race(methods, seconds, nodes, rate, rounds)
    rows = [
        (
            name, f"{found.step(name):.3f} s", f"{found.ratio(name, ALONE):.2f}",
            f"{found.ratio(name, theirs[name]):.2f}" if name in theirs else "",
            f"{found.bytes(name) / 1e6:.2f} MB", f"{found.loss_in_steps(name):.3f}",
        )
        for name in methods
    ]  # fmt: skip
    over = found.ratio(STREAMING, ALONE)
    claims = [at_most("streaming DiLoCo takes as long as computing alone", over, 1.05)]
    for their, our in theirs.items():
        claims.append(at_most(f"{our} is no slower than {their}", found.ratio(our, their), 1.0))
        if "delay" not in their:  # its schedule and its fragments are others
            apart = found.loss_in_steps(our) - found.loss_in_steps(their)
            text = f"{our} and {their} learn alike"
            claims.append(Claim(text, "within 0.05", f"{apart:+.3f}", abs(apart) <= 0.05))
    loss = f"loss after {found.common_steps} steps"
    headings = ("method", "a step", "x alone", "x ours", "sent a step", loss)
    title = f"A GPT, {nodes} nodes, {rate}; held-out losses"
    return Result(title, headings, rows, claims, found.rounds)
