"""The profile of a script, which runs alone on this machine for some steps."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from offbeat.compare import Experiment, Method, Run, open_runner, run_experiment
from offbeat.compare.measure import warm_up
from offbeat.compare.progress import ProgressView
from offbeat.plan.profile import Parameter, Profile
from offbeat.plan.speeds import Speeds
from offbeat.telemetry.gradient_times import GRADIENTS_VARIABLE
from offbeat.telemetry.recording import Recording, Step

LEAST = 5  # steps that count


def measure_profile(
    script: Path, arguments: Sequence[str], steps: int, env_only: bool, console: Console
) -> Profile:
    """Run ``script`` as one rank that exchanges nothing, and measure the passes over memory.

    Progress is printed to ``console``. Raises ``ValueError`` if the script ends before enough
    steps, and RuntimeError if it fails.
    """
    alone = Method.parse("alone")
    experiment = Experiment(
        script,
        (alone,),
        alone,
        tuple(arguments),
        steps=None if env_only else steps,
        rounds=1,
        env_only=env_only,
        environment={GRADIENTS_VARIABLE: "1"},
    )
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder, open_runner(1, 1, None) as (runner, _):
        with ProgressView(experiment, console).shown() as view:
            run_experiment(experiment, runner, Path(folder), runs, view.observe)
        run = runs[0]
        if run.failure:
            raise RuntimeError(f"profile: the script failed ({run.failure}); its output is above")
        recordings = run.recordings()
    device = device_of(recordings)
    with console.status("measuring passes over memory"):
        speeds = Speeds.measure(device)
    return profile_of(recordings, speeds)


def device_of(recordings: Sequence[Recording]) -> str:
    """Return the kind of device on which the first rank has trained."""
    steps = recordings[0].steps if recordings else []
    return steps[-1].device if steps else "cpu"


def profile_of(recordings: Sequence[Recording], speeds: Speeds) -> Profile:
    """Return the means over the steps of a recorded rank after its warm-up."""
    steps = recordings[0].steps if recordings else []
    counted = steps[warm_up(len(steps)) :] if steps else []
    if len(counted) < LEAST:
        raise ValueError(
            f"profile: the script ended after {len(steps)} steps, before the profile was done; "
            f"{len(counted)} of them count after the warm-up, expected at least {LEAST}: give "
            "more --steps, and call replica.step() after every optimizer step"
        )
    if (count := recordings[0].replicas) > 1:
        raise ValueError(
            f"profile: the script makes {count} replicas, whose steps cannot be told apart; give "
            "one that calls replicate() once"
        )
    begun = [_end(step, "forward") for step in counted]  # of backward: at its first gradient
    forward = fmean(begun)
    backward = fmean(_end(step, "backward") for step in counted) - forward
    total = fmean(step.seconds for step in counted)
    parameters = [
        Parameter(name, numel, dtype, min(backward, _ready(name, counted, begun, backward)))
        for name, (numel, dtype) in counted[-1].parameters.items()
    ]
    return Profile(
        parameters=tuple(parameters),
        forward=forward,
        backward=backward,
        optimizer=total - forward - backward,
        speeds=speeds,
        spread=tuple(step.seconds / total for step in counted),
        memory=max((step.memory for step in counted if step.memory is not None), default=None),
        device=device_of(recordings),
    )


def _end(step: Step, kind: str) -> float:
    return max((end for _, end in step.spans_of(kind)), default=0.0)


def _ready(name: str, steps: Sequence[Step], begun: Sequence[float], unused: float) -> float:
    """Return when a gradient is ready after the first one; ``unused`` if it never is."""
    times = [s.ready[name] - b for s, b in zip(steps, begun, strict=True) if name in s.ready]
    return max(0.0, fmean(times)) if times else unused
