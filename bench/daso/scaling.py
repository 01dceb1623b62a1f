"""Training time of DASO as nodes are added, beside averaged gradients (Figures 6 and 8).

The number of samples is the same for all world sizes, so that twice the nodes take half the steps.
Computation is a pause, as on an accelerator.
"""

import offbeat
from bench.harness import Bench, Claim, Effect, Result, command, numbers
from bench.harness.step_times import StepTime, Timed, step_times

PER_NODE = 2
DDP, HALF, DASO = "ddp", "ddp, 16 bits", "DASO"
SAVED = Effect(35.0)  # % of time, up to 32 nodes (Fig. 8); 25 % in Fig. 6
HEADINGS = ("nodes", "method", "steps", "training", "a step", "less time than ddp")
BENCH = Bench(
    name="daso/scaling",
    claim="DASO takes 25 to 35 % less time (Fig. 6, 8)",
    minutes=5,
    full_minutes=18,
    evidence={"Fig. 6, 8": "25 to 35 % less time of training"},
)


def cases(steps: int) -> list[Timed]:
    """The paper's Horovod sends 16 bits, and its DASO exchanges every fourth batch."""
    phase = max(1, steps // 20)
    daso = offbeat.daso(every=4, total_steps=steps, warmup_steps=phase, cooldown_steps=phase)
    return [
        Timed(DDP, offbeat.ddp(), steps, 0),
        Timed(HALF, offbeat.ddp(wire="bf16"), steps, 0),
        Timed(DASO, daso, steps, 0),
        Timed("compute only", offbeat.alone(), steps, 0),
    ]


def less(found: dict[str, StepTime], than: str = DDP, name: str = DASO) -> float:
    """By which share of the other's time a method is faster."""
    return 1 - found[name].whole / found[than].whole


def claims(found: dict[int, dict[str, StepTime]]) -> list[Claim]:
    few, many = min(found), max(found)
    saved, half = ([less(methods, than) for methods in found.values()] for than in (DDP, HALF))
    gain = found[few][DASO].whole / found[many][DASO].whole
    ideal = many / few
    return [
        Claim.effect("DASO takes less time than ddp at every number of nodes (least)", SAVED,
                     Effect(100 * min(saved))),
        Claim.effect("also where gradients are sent in 16 bits, as the paper's do (least)", SAVED,
                     Effect(100 * min(half))),
        Claim.effect(f"{ideal:g} times the nodes train faster", Effect(ideal, "x"),
                     Effect(gain, "x")),
        Claim("with the most nodes less is saved, since there are fewer steps",
              "30 % instead of 35 %", f"{saved[-1]:.0%} instead of {max(saved[:-1]):.0%}",
              saved[-1] < max(saved[:-1])),
    ]  # fmt: skip


@command(
    BENCH, "--full", full="Four times the samples.", nodes="Numbers of nodes, at least two.",
    pause="Seconds that a step computes.", samples="Steps of all nodes together.",
)  # fmt: skip
def app(
    full: bool = False,
    nodes: str = "2,4,8",
    rate: str = "25mbit",
    pause: float = 0.25,
    samples: int = 96,
) -> Result:
    """Compare the time of whole runs on 2, 4 and 8 nodes."""
    rows, found = [], {}
    for count in sorted(numbers(nodes)):
        steps = samples * (4 if full else 1) // count
        timed = found[count] = step_times(cases(steps), count, PER_NODE, rate, (pause, 156))
        for name, pace in timed.items():
            times = f"{pace.whole:.1f} s", f"{pace.step:.3f} s", f"{less(timed, DDP, name):.0%}"
            rows.append((f"{count}", name, f"{steps}", *times))
    title = f"Figures 6 and 8: time of training, {PER_NODE} processes per node ({rate})"
    return Result(title, HEADINGS, rows, claims(found), measured=found)
