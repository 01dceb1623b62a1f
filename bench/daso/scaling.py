"""25 to 35 % less time of training."""

import offbeat
from bench.harness import Bench, Claim, Effect, Result, command, numbers
from bench.harness.step_times import Timed, step_times

PER_NODE = 2
DDP, HALF, DASO = "ddp", "ddp, 16 bits", "DASO"
SAVED = Effect(35.0)  # % of time, up to 32 nodes (Fig. 8); 25 % in Fig. 6
HEADINGS = ("nodes", "method", "steps", "training", "a step", "less time than ddp")
BENCH = Bench(name="daso/scaling", minutes=5, full_minutes=18, evidence="Fig. 6, 8")


def cases(steps: int) -> list[Timed]:
    """The paper's Horovod sends 16 bits, and its DASO exchanges every fourth batch."""
    phase = max(1, steps // 20)
    daso = offbeat.daso(every=4, total_steps=steps, warmup_steps=phase, cooldown_steps=phase)
    methods = {DDP: offbeat.ddp(), HALF: offbeat.ddp(wire="bf16"), DASO: daso,
               "compute only": offbeat.alone()}  # fmt: skip
    return [Timed(name, method, steps, 0) for name, method in methods.items()]


@command(
    BENCH, "--full", full={"samples": 384}, nodes="Numbers of nodes, at least two.",
    pause="Seconds that a step computes.", samples="Steps of all nodes together.",
)  # fmt: skip
def app(
    nodes: str = "2,4,8", rate: str = "25mbit", pause: float = 0.25, samples: int = 96
) -> Result:
    """Compare the time of whole runs on 2, 4 and 8 nodes, all of equally many samples."""
    rows, found, less = [], {}, {}
    for count in sorted(numbers(nodes, least=2)):
        steps = samples // count
        timed = found[count] = step_times(cases(steps), count, PER_NODE, rate, (pause, 156))
        for name, pace in timed.items():
            saved = f"{1 - pace.whole / timed[DDP].whole:.0%}"
            rows.append((f"{count}", name, f"{steps}", f"{pace.whole:.1f} s", f"{pace.step:.3f} s",
                         saved))  # fmt: skip
        for than in (DDP, HALF):
            less.setdefault(than, []).append(1 - timed[DASO].whole / timed[than].whole)
    few, many = min(found), max(found)
    gain = found[few][DASO].whole / found[many][DASO].whole
    *fewer, last = less[DDP]
    claims = [
        Claim.effect("DASO takes less time than ddp at every number of nodes (least)", SAVED,
                     Effect(100 * min(less[DDP]))),
        Claim.effect("also where gradients are sent in 16 bits, as the paper's do (least)", SAVED,
                     Effect(100 * min(less[HALF]))),
        Claim.effect(f"{many / few:g} times the nodes train faster", Effect(many / few, "x"),
                     Effect(gain, "x")),
        Claim("with the most nodes less is saved, since there are fewer steps",
              "30 % instead of 35 %", f"{last:.0%} instead of {max(fewer):.0%}",
              last < max(fewer)),
    ]  # fmt: skip
    title = f"Figures 6 and 8: time of training, {PER_NODE} processes per node ({rate})"
    return Result(title, HEADINGS, rows, claims, found)
