"""Time and accuracy of SGP as nodes are added (Table 1, Figure 1 of the paper).

All-reduce, D-PSGD and SGP, the latter two with one peer. The number of samples is the same for
all world sizes, so that more workers take fewer steps. Accuracy is that of virtual workers on
MNIST-1D.
"""

import offbeat
from bench.harness import NEAR, Bench, Claim, Effect, Result, command, numbers
from bench.harness.rows import in_rows, signals_case
from bench.harness.seeds import Runs, over_seeds
from bench.sgp.task import LINK, Times, times

AR, PAIRS, SGP, ALONE = "AR-SGD", "D-PSGD", "SGP", "compute only"
METHODS = {AR: offbeat.ddp(), PAIRS: offbeat.d_psgd("bipartite"), SGP: offbeat.sgp()}
PAPER = {  # accuracy in %, hours
    4: {AR: (76.2, 22.0), PAIRS: (76.4, 19.7), SGP: (76.3, 11.8)},
    8: {AR: (76.4, 14.0), PAIRS: (76.1, 9.7), SGP: (76.4, 5.9)},
    16: {AR: (76.3, 8.5), PAIRS: (75.9, 5.0), SGP: (75.9, 3.2)},
    32: {AR: (76.2, 5.1), PAIRS: (74.4, 2.6), SGP: (75.0, 1.7)},
}
MANY = (16, 32)  # workers with which the paper's accuracies are no longer the same
HEADINGS = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR", "a step")
BENCH = Bench(
    name="sgp/scaling",
    claim="SGP is faster at every size (Table 1, Fig. 1)",
    minutes=6,
    full_minutes=12,
    evidence={
        "Table 1, Fig. 1": "Faster than all-reduce and D-PSGD; less accurate with many nodes"
    },
)


def rows(world: int, found: dict[str, Runs], timed: Times | None) -> list[tuple[str, ...]]:
    lines = []
    for name, (accuracy, hours) in PAPER[world].items():
        theirs = f"{PAPER[world][AR][1] / hours:.2f}"
        ours = (f"{timed[AR] / timed[name]:.2f}", ms(timed[name])) if timed else ("", "")
        lines.append((f"{world}", name, f"{accuracy}%", str(found[name]), theirs, *ours))
    alone = [(f"{world}", ALONE, *[""] * 4, ms(timed[ALONE]))] if timed else []
    return lines + alone


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def faster(nodes: int, timed: Times, other: str) -> Claim:
    paper = PAPER[nodes][other][1] / PAPER[nodes][SGP][1]
    text = f"{nodes} nodes: SGP is faster than {other}"
    return Claim.effect(text, Effect(paper, "x"), Effect(timed[other] / timed[SGP], "x"))


def growth(few: int, many: int, seconds: dict[int, Times]) -> Claim:
    factors = {name: seconds[many][name] / seconds[few][name] for name in METHODS}
    ours = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    text = f"a step of SGP grows less than one of AR, {few} to {many} nodes"
    return Claim(text, "AR 1.55, D-PSGD 1.02, SGP 1.08", ours, factors[SGP] < factors[AR])


def accurate(world: int, found: dict[str, Runs], name: str) -> Claim:
    paper = Effect(PAPER[world][name][0] - PAPER[world][AR][0])
    ours = found[name].over(found[AR])
    if world in MANY:
        return Claim.effect(f"{world} workers: {name} is less accurate than {AR}", paper, ours)
    text = f"{world} workers: {name} is about as accurate as {AR}"
    return Claim(text, str(paper), str(ours), abs(ours.size) < NEAR)


@command(BENCH, "--full", full="Twice the seeds.", nodes="Nodes of the lab: 4, 8, 16.")
def app(full: bool = False, nodes: str = "4,8,16", seeds: int = 5) -> Result:
    """Compare all-reduce, D-PSGD and SGP with 4 to 32 workers."""
    every = METHODS | {ALONE: offbeat.alone()}
    timed = {count: times(every, count, 20)[0] for count in numbers(nodes)}
    found = {
        world: {
            name: over_seeds(in_rows, signals_case(name, each, world), seeds * (1 + full))
            for name, each in METHODS.items()
        }
        for world in PAPER
    }
    judged = [faster(count, each, o) for count, each in timed.items() for o in (AR, PAIRS)]
    judged.append(growth(min(timed), max(timed), timed))
    judged += [accurate(world, each, n) for world, each in found.items() for n in (PAIRS, SGP)]
    lines = [row for world, each in found.items() for row in rows(world, each, timed.get(world))]
    title = f"Table 1: accuracy, and how much faster than all-reduce ({LINK})"
    measured = {"seconds": timed, "accuracy": found}
    return Result(title, HEADINGS, lines, judged, measured=measured)
