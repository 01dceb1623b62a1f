"""Time of a step with an option that nothing makes use of, relative to one without.

`elastic=True` while nobody is lost, and `weighted=True` with equal weights. All train copies of one
model in the same processes, in turns.
"""

from functools import partial

from torch import nn
from torch.optim import SGD

from bench.ddp.overhead import ratios, task
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.attached import Attached, Build, attach
from bench.harness.training import Times, Training, times

RECIPES = (
    "ddp", "lags(density=0.1)", "adasum", "local_sgd(every=4)", "diloco(every=4)", "sgp(overlap=1)",
)  # fmt: skip
PLACES = {  # steps of a turn, nodes, rate, workers of a node
    "two workers on loopback": (17, 1, None, 2),
    "four nodes, 250 Mbit/s": (8, 4, "250mbit", 1),
}
MOST = {"elastic": 1.01, "weighted": 1.05}  # goals, by the option
HEADINGS = ("recipe", "network", "option", "without", "with it", "ratio", "95 %")
BENCH = Bench(
    name="elastic/undisturbed",
    claim="elastic=True and weighted=True cost little while ranks are alike",
    minutes=10,
    full_minutes=24,
)


def attach_either(method: str, model: nn.Module, build: Build) -> Attached:
    """A recipe, with the option that stands behind its name."""
    text, _, option = method.partition(", ")
    return attach(text, model, build, **({option: True} if option else {}))


def judge(
    text: str, place: str, option: str, plain: Times, other: Times
) -> tuple[tuple[str, ...], Claim]:
    """One line of the table, and its claim."""
    ratio, low, high = ratios(other, plain)
    seconds = (f"{each.step * 1e3:.2f} ms" for each in (plain, other))
    row = text, place, option, *seconds, f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"
    said = f"{ratio:.3f} x ({low:.3f} - {high:.3f})"
    claim, most = f"{text}, {place}: a step with {option}=True", MOST[option]
    return row, Claim(claim, f"at most {most} x, within 95 %", said, low <= most, GOAL)


@command(BENCH, "--full", full="400 rounds.")
def app(full: bool = False, rounds: int = 60) -> Result:
    """Compare under several recipes, on loopback and on a slow network."""
    rounds, judged, found = 400 if full else rounds, [], {}
    for place, (steps, nodes, rate, workers) in PLACES.items():
        for text in RECIPES:
            methods = text, *(f"{text}, {option}" for option in MOST)
            make, sgd = partial(task, "conv"), partial(SGD, lr=0.01)
            turns = Training(
                make, methods, steps, rounds, lead=20, optimizer=sgd, attach=attach_either
            )
            each = times(turns, nodes, rate, workers)
            judged += [
                judge(text, place, option, each[text], each[method])
                for option, method in zip(MOST, methods[1:], strict=True)
            ]
            found[f"{text}, {place}"] = each
    title = f"Seconds per step with an option relative to those without, {rounds} rounds"
    rows, claims = [row for row, _ in judged], [claim for _, claim in judged]
    return Result(title, HEADINGS, rows, claims, found)
