"""``elastic=True`` costs little while nobody is lost, and ``weighted=True`` with equal weights."""

from functools import partial
from itertools import product

from torch import nn
from torch.optim import SGD

from bench.ddp.overhead import ratios, task
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.attached import Attached, Build, attach
from bench.harness.training import Training, times

RECIPES = (
    "ddp", "lags(density=0.1)", "adasum", "local_sgd(every=4)", "diloco(every=4)", "sgp(overlap=1)",
)  # fmt: skip
PLACES = {  # steps of a turn, nodes, rate, workers of a node
    "two workers on loopback": (17, 1, None, 2),
    "four nodes, 250 Mbit/s": (8, 4, "250mbit", 1),
}
MOST = {"elastic": 1.01, "weighted": 1.05}  # goals, by the option
HEADINGS = ("recipe", "network", "option", "without", "with it", "ratio", "95 %")
BENCH = Bench(name="elastic/undisturbed", minutes=10, full_minutes=24)


def attach_either(method: str, model: nn.Module, build: Build) -> Attached:
    """A recipe, with the option that stands behind its name."""
    text, _, option = method.partition(", ")
    return attach(text, model, build, **({option: True} if option else {}))


@command(BENCH, "--full", full={"rounds": 400})
def app(rounds: int = 60) -> Result:
    """Train copies of one model in turns, on loopback and on a slow network."""
    rows, claims, found = [], [], {}
    for (place, (steps, *where)), text in product(PLACES.items(), RECIPES):
        methods = text, *(f"{text}, {option}" for option in MOST)
        turns = Training(
            partial(task, "conv"), methods, steps, rounds, lead=20, optimizer=partial(SGD, lr=0.01),
            attach=attach_either,
        )  # fmt: skip
        each = found[f"{text}, {place}"] = times(turns, *where)
        for option, most in MOST.items():
            plain, other = each[text], each[f"{text}, {option}"]
            ratio, low, high = ratios(other, plain)
            cells = (f"{some.step * 1e3:.2f} ms" for some in (plain, other))
            rows.append((text, place, option, *cells, f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"))
            said = f"{ratio:.3f} x ({low:.3f} - {high:.3f})"
            claim, bound = f"{text}, {place}: a step with {option}=True", f"at most {most} x"
            claims.append(Claim(claim, f"{bound}, within 95 %", said, low <= most, GOAL))
    title = f"Seconds per step with an option relative to those without, {rounds} rounds"
    return Result(title, HEADINGS, rows, claims, found)
