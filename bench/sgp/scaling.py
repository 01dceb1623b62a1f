"""Faster than all-reduce and D-PSGD; less accurate with many nodes."""

import offbeat
from bench.harness import NEAR, Bench, Claim, Effect, Result, command, numbers
from bench.harness.rows import in_rows, signals_case
from bench.harness.seeds import over_seeds
from bench.sgp.task import LINK, seconds

AR, PAIRS, SGP = "AR-SGD", "D-PSGD", "SGP"
METHODS = {AR: offbeat.ddp(), PAIRS: offbeat.d_psgd("bipartite"), SGP: offbeat.sgp()}
PAPER = {  # accuracy in %, hours
    4: {AR: (76.2, 22.0), PAIRS: (76.4, 19.7), SGP: (76.3, 11.8)},
    8: {AR: (76.4, 14.0), PAIRS: (76.1, 9.7), SGP: (76.4, 5.9)},
    16: {AR: (76.3, 8.5), PAIRS: (75.9, 5.0), SGP: (75.9, 3.2)},
    32: {AR: (76.2, 5.1), PAIRS: (74.4, 2.6), SGP: (75.0, 1.7)},
}
SAME = (4, 8)  # workers with which the paper's accuracies are the same
HEADINGS = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR", "a step")
BENCH = Bench(name="sgp/scaling", minutes=6, full_minutes=12, evidence="Table 1, Fig. 1")


@command(BENCH, "--full", full={"seeds": 10}, nodes="Nodes of the lab: 4, 8, 16.")
def app(nodes: str = "4,8,16", seeds: int = 5) -> Result:
    """Train 4 to 32 virtual workers on equally many samples of MNIST-1D; time steps in the lab."""
    rows, claims, found = [], [], {}
    timed = {count: seconds(METHODS, count, 20) for count in numbers(nodes)}
    for count, step in timed.items():
        for other in (AR, PAIRS):
            theirs = Effect(PAPER[count][other][1] / PAPER[count][SGP][1], "x")
            ours = Effect(step[other] / step[SGP], "x")
            text = f"{count} nodes: SGP is faster than {other}"
            claims.append(Claim.effect(text, theirs, ours))
    few, many = min(timed), max(timed)
    grows = {name: timed[many][name] / timed[few][name] for name in METHODS}
    ours = ", ".join(f"{name} {factor:.2f}" for name, factor in grows.items())
    text = f"a step of SGP grows less than one of AR, {few} to {many} nodes"
    claims.append(Claim(text, "AR 1.55, D-PSGD 1.02, SGP 1.08", ours, grows[SGP] < grows[AR]))
    for world, paper in PAPER.items():
        found[world], step = {}, timed.get(world)
        for name, (accuracy, hours) in paper.items():
            case = signals_case(name, METHODS[name], world)
            runs = found[world][name] = over_seeds(in_rows, case, seeds)
            faster, pace = "", ""
            if step:
                faster, pace = f"{step[AR] / step[name]:.2f}", f"{step[name] * 1e3:.0f} ms"
            cells = f"{accuracy}%", str(runs), f"{paper[AR][1] / hours:.2f}", faster, pace
            rows.append((f"{world}", name, *cells))
        for name in (PAIRS, SGP):
            theirs = Effect(paper[name][0] - paper[AR][0])
            ours = found[world][name].over(found[world][AR])
            if world in SAME:
                text = f"{world} workers: {name} is about as accurate as {AR}"
                claims.append(Claim(text, str(theirs), str(ours), abs(ours.size) < NEAR))
            else:
                text = f"{world} workers: {name} is less accurate than {AR}"
                claims.append(Claim.effect(text, theirs, ours))
    title = f"Table 1: accuracy, and how much faster than all-reduce ({LINK})"
    return Result(title, HEADINGS, rows, claims, {"seconds": timed, "accuracy": found})
