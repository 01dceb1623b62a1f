"""More peers, at least early, are slower and more accurate."""

import numpy as np

import offbeat
from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.case import Pause
from bench.harness.rows import in_rows, signals_case
from bench.harness.seeds import over_seeds
from bench.sgp.task import LINK, timed
from offbeat import Complete, Exponential, Phases

UNEVEN = Pause(0.1, uneven=True)  # exponential, the usual model of stragglers; 0.014 s on the link
PAPER = {  # accuracy in %, hours
    16: {"AR-SGD": (76.3, 8.5), "2P-SGP": (76.2, 5.1), "1P-SGP": (75.9, 3.2),
         "AR/1P-SGP": (76.2, 4.8), "2P/1P-SGP": (76.0, 3.5)},
    32: {"AR-SGD": (76.2, 5.2), "2P-SGP": (75.7, 2.5), "1P-SGP": (75.0, 1.7),
         "AR/1P-SGP": (75.4, 2.8), "2P/1P-SGP": (75.1, 1.8)},
}  # fmt: skip
PURE = {"AR-SGD": offbeat.ddp(), "2P-SGP": offbeat.sgp(peers=2), "1P-SGP": offbeat.sgp()}
EARLY = {"AR": Complete(), "2P": Exponential(2)}  # graphs of the first third of a hybrid
HEADINGS = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR", "uneven, x AR")
BENCH = Bench(name="sgp/graphs", minutes=10, full_minutes=16, evidence="Table 3")


def method(name: str, steps: int) -> offbeat.Algorithm:
    if name in PURE:
        return PURE[name]
    return offbeat.sgp(Phases(((steps // 3, EARLY[name[:2]]), (None, Exponential()))))


def paces(*where: object) -> dict[str, np.ndarray]:
    """Seconds of a step in each run; those of hybrids follow from their phases."""
    found = {
        name: np.array([run.seconds for run in runs]) for name, runs in timed(PURE, *where).items()
    }
    later = 2 / 3 * found["1P-SGP"]
    return found | {
        "AR/1P-SGP": found["AR-SGD"] / 3 + later, "2P/1P-SGP": found["2P-SGP"] / 3 + later
    }  # fmt: skip


@command(BENCH, "--full", full={"seeds": 30}, nodes="With slow links.", runs="That are timed.")
def app(seeds: int = 15, nodes: int = 8, runs: int = 5) -> Result:
    """Train 16 and 32 virtual workers; time steps on slow links, and with uneven computing."""
    rows, claims = [], []
    times = {
        "seconds": paces(nodes, 20, None, LINK, runs),
        "uneven": paces(16, 40, UNEVEN, "250mbit", runs),
    }
    faster = [
        {name: Effect.between(each["AR-SGD"], step, "x") for name, step in each.items()}
        for each in times.values()
    ]
    measured = {k: {name: x.tolist() for name, x in each.items()} for k, each in times.items()}
    for world, paper in PAPER.items():
        found = measured[world] = {}
        for name, (accuracy, hours) in paper.items():
            steps = signals_case(name, PURE["AR-SGD"], world).steps
            case = signals_case(name, method(name, steps), world)
            found[name] = over_seeds(in_rows, case, seeds)
            ours = (f"{each[name].size:.2f}" for each in faster)
            theirs = f"{paper['AR-SGD'][1] / hours:.2f}"
            rows.append((f"{world}", name, f"{accuracy}%", str(found[name]), theirs, *ours))
        for name in (name for name in paper if name != "1P-SGP"):
            theirs = Effect(paper[name][0] - paper["1P-SGP"][0])
            text = f"{world} workers: {name} is more accurate than 1P-SGP"
            claims.append(Claim.effect(text, theirs, found[name].over(found["1P-SGP"])))
    for name in ("1P-SGP", "2P-SGP"):
        theirs = Effect(PAPER[16]["AR-SGD"][1] / PAPER[16][name][1], "x")
        text = f"{name} is faster than AR-SGD between workers that compute unevenly"
        claims.append(Claim.effect(text, theirs, faster[1][name]))
    title = f"Table 3: accuracy, and how much faster than all-reduce ({LINK})"
    return Result(title, HEADINGS, rows, claims, measured)
