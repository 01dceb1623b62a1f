"""Time of a step with `elastic=True` while nobody is lost, relative to one without.

Both train copies of one model in the same processes, in turns.
"""

from functools import partial

from torch import nn
from torch.optim import SGD

from bench.ddp.overhead import ratios, task
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.attached import Attached, Build, attach
from bench.harness.training import Times, Training, times

RECIPES = ("ddp", "lags(density=0.1)", "local_sgd(every=4)", "diloco(every=4)", "sgp(overlap=1)")
PLACES = {  # steps of a turn, nodes, rate, workers of a node
    "two workers on loopback": (17, 1, None, 2),
    "four nodes, 250 Mbit/s": (8, 4, "250mbit", 1),
}
MOST = 1.01
HEADINGS = ("recipe", "network", "elastic=False", "elastic=True", "ratio", "95 %")
BENCH = Bench(
    name="elastic/undisturbed",
    claim="elastic=True costs nothing while nobody is lost",
    minutes=4,
    full_minutes=16,
)


def attach_either(method: str, model: nn.Module, build: Build) -> Attached:
    """A recipe, elastic if its name ends so."""
    text = method.removesuffix(", elastic")
    return attach(text, model, build, elastic=text != method)


def judge(text: str, place: str, plain: Times, elastic: Times) -> tuple[tuple[str, ...], Claim]:
    """One line of the table, and its claim."""
    ratio, low, high = ratios(elastic, plain)
    seconds = (f"{each.step * 1e3:.2f} ms" for each in (plain, elastic))
    row = text, place, *seconds, f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"
    said = f"{ratio:.3f} x ({low:.3f} - {high:.3f})"
    claim = f"{text}, {place}: a step with elastic=True"
    return row, Claim(claim, f"at most {MOST} x, within 95 %", said, low <= MOST, GOAL)


@command(BENCH, "--full", full="400 rounds.")
def app(full: bool = False, rounds: int = 80) -> Result:
    """Compare under several recipes, on loopback and on a slow network."""
    rounds, judged, found = 400 if full else rounds, [], {}
    for place, (steps, nodes, rate, workers) in PLACES.items():
        for text in RECIPES:
            methods, sgd = (text, f"{text}, elastic"), partial(SGD, lr=0.01)
            make = partial(task, "conv")
            turns = Training(
                make, methods, steps, rounds, lead=20, optimizer=sgd, attach=attach_either
            )
            each = times(turns, nodes, rate, workers)
            judged.append(judge(text, place, *(each[method] for method in methods)))
            found[f"{text}, {place}"] = each
    title = f"Seconds per step with elastic=True relative to those without, {rounds} rounds"
    rows, claims = [row for row, _ in judged], [claim for _, claim in judged]
    return Result(title, HEADINGS, rows, claims, found)
