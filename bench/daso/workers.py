"""As accurate as averaging, but with the most workers."""

from dataclasses import replace

import offbeat
from bench.harness import NEAR, Bench, Claim, Result, command
from bench.harness.rows import in_rows, signals_case
from bench.harness.seeds import over_seeds

PER_NODE, PASSES, RATE = 4, 50.0, 0.01  # workers; passes over the data; rate of one worker
WORLDS = FEW, *_, MANY = (8, 16, 32, 64)
DDP, DASO = METHODS = ("ddp", "DASO")
HEADINGS = ("workers", "method", "steps", "held out", "against ddp")
BENCH = Bench(name="daso/workers", minutes=4, full_minutes=8, evidence="Fig. 7, 9")


@command(BENCH, "--full", full={"seeds": 10})
def app(seeds: int = 5) -> Result:
    """Train 8 to 64 workers on equally many samples, at rates that grow with their number."""
    rows, found = [], {}
    for workers in WORLDS:
        found[workers] = {}
        for name in METHODS:
            case = signals_case(name, offbeat.ddp(), workers, PASSES, RATE)
            if name == DASO:  # B stays 4 between warm-up and cool-down: no losses are reported
                phase = max(1, case.steps // 20)
                method = offbeat.daso(
                    every=4, total_steps=case.steps, warmup_steps=phase, cooldown_steps=phase
                )
                case = replace(case, algorithm=method)
            case = replace(case, per_node=PER_NODE)
            runs = found[workers][name] = over_seeds(in_rows, case, seeds)
            against = f"{runs.mean - found[workers][DDP].mean:+.1f}%"
            rows.append((f"{workers}", name, f"{case.steps}", str(runs), against))
    gaps = {workers: found[workers][DASO].over(found[workers][DDP]) for workers in WORLDS}
    falls = {name: found[MANY][name].over(found[FEW][name]) for name in METHODS}
    last = gaps[MANY]
    claims = [
        *(Claim(f"{workers} workers: DASO is about as accurate as ddp (Fig. 7)",
                "similar up to 128 GPUs", str(gaps[workers]), gaps[workers].size > -NEAR)
          for workers in WORLDS[:-1]),
        Claim(f"both are worse with {MANY} workers than with {FEW} (Fig. 7)",
              "below 75 % with 256 GPUs",
              ", ".join(f"{name} {fall}" for name, fall in falls.items()),
              all(fall.size < 0 and fall.is_beyond_noise for fall in falls.values())),
        Claim(f"{MANY} workers: DASO is less accurate than ddp (Fig. 7)", "more dramatic with DASO",
              str(last), last.size < -NEAR and last.is_beyond_noise),
    ]  # fmt: skip
    title = f"Figure 7: held-out accuracy, {PER_NODE} workers per node"
    return Result(title, HEADINGS, rows, claims, found)
