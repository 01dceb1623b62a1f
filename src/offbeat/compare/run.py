"""The runs of an experiment: one method in one round, with a folder of its own."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Unpack, final

from offbeat.compare.experiment import Experiment, Method
from offbeat.compare.measure import Measures, measure_run
from offbeat.lab import Lab, Loopback, Runner, Unavailable
from offbeat.lab.network.links import LinkOptions
from offbeat.recipes import ALGORITHM_VARIABLE
from offbeat.telemetry.recorder import FOLDER_VARIABLE
from offbeat.telemetry.recording import Recording, read_run

LAST_LINES = 15
OUTPUT = "output.txt"  # of all ranks of a run, beside their recordings


@final
@dataclass
class Run:
    """Records one run of a method: its round, folder and exit code.

    ``code`` is the exit code; None while the run is in progress, or if it was interrupted.
    """

    method: Method
    round: int
    folder: Path
    code: int | None = None
    failed_rank: int | None = None
    last_lines: list[str] = field(default_factory=list)  # of the rank that failed

    @property
    def failure(self) -> str | None:
        """The round, rank and exit code of a run that failed; None if it did not."""
        if self.code in (None, 0):
            return None
        rank = "" if self.failed_rank is None else f"rank {self.failed_rank}, "
        return f"round {self.round}, {rank}exit code {self.code}"

    @cached_property
    def measures(self) -> Measures | None:
        """The measurements of a run that has ended; None unless every rank has recorded a step."""
        found = self.recordings()
        return measure_run(found) if found else None

    def recordings(self) -> list[Recording]:
        """Read the recordings of all ranks; empty unless every rank has recorded a step."""
        found = [recording for recording in read_run(self.folder) if recording.steps]
        expected = {rank for recording in found[:1] for ranks in recording.nodes for rank in ranks}
        return found if {recording.rank for recording in found} == expected else []


# What follows the progress of a run: a context that is entered for as long as the run lasts.
Observer = Callable[[Run], AbstractContextManager[None]]


@contextmanager
def open_runner(
    nodes: int,
    procs_per_node: list[int] | int,
    rate: str | None,
    **far: Unpack[LinkOptions],
) -> Iterator[tuple[Runner, str | None]]:
    """Open a lab with these links, or loopback where they have no limits or there is no lab.

    Yields the runner, and the reason why its network has no limits (None if it has some). Raises
    ValueError for an invalid layout or link. ``far`` are the further options of
    :class:`~offbeat.lab.Lab`.
    """
    with ExitStack() as stack:
        lab, reason = Lab(nodes, procs_per_node, rate, **far), "no --rate was given"
        try:
            runner: Runner | None = stack.enter_context(lab) if lab.links.limited else None
        except Unavailable as error:
            runner, reason = None, str(error)
        if runner is not None:
            yield runner, None
        else:
            yield stack.enter_context(Loopback(nodes, procs_per_node)), f"{_UNSHAPED}: {reason}"


def run_experiment(
    experiment: Experiment, runner: Runner, folder: Path, runs: list[Run], observe: Observer
) -> None:
    """Run all methods on ``runner``, which must have been entered, and append to ``runs``.

    A method that failed is not run again. After Ctrl-C the interrupted run is the last one, with
    ``code`` None. Raises ValueError for invalid stragglers, before anything is removed.
    """
    first, *_ = experiment.methods
    runner.validate(experiment.command(first), faults=experiment.stragglers)
    for old in folder.glob("round*/*"):
        _clear_folder(old)
    failed: set[Method] = set()
    for number, method in experiment.run_order():
        if method in failed:
            continue
        index = experiment.methods.index(method)
        home = folder / f"round{number}" / f"{index}-{method.slug}"
        runs.append(run := Run(method, number, _clear_folder(home)))
        with observe(run):
            _execute(run, experiment, runner)
        if run.failure:
            failed.add(method)


def _execute(run: Run, experiment: Experiment, runner: Runner) -> None:
    lines: dict[int | None, deque[str]] = {}
    with (run.folder / OUTPUT).open("w", encoding="utf-8") as output:

        def keep(rank: int | None, line: str) -> None:
            lines.setdefault(rank, deque(maxlen=LAST_LINES)).append(line)
            output.write(f"[{'lab' if rank is None else rank}] {line}\n")

        env = {
            **experiment.environment,
            FOLDER_VARIABLE: str(run.folder.absolute()),
            ALGORITHM_VARIABLE: run.method.text,
        }
        command, slow = experiment.command(run.method), experiment.stragglers
        code = runner.run(command, env=env, faults=slow, on_line=keep)
    if code != 0:
        run.failed_rank = _cause(lines)
        run.last_lines = list(lines.get(run.failed_rank, ()))
        if not experiment.env_only and any(map(_REFUSED_OPTION.search, run.last_lines)):
            run.last_lines.append(_USE_ENV_ONLY)
    elif fault := _recording_fault(run):
        code, run.last_lines = 1, [fault]
    run.code = code


def _cause(lines: Mapping[int | None, Iterable[str]]) -> int | None:
    """Return the rank whose lines hold the cause of a failure; the runner names one that ended.

    >>> _cause({None: ["rank 0 failed: exit code 1"], 0: ["PeerLost: rank 1 has left"], 1: ["-"]})
    1
    """
    named = re.search(r"rank (\d+) failed", "\n".join(lines.get(None, ())))
    if named is None:
        return None
    ended = int(named[1])
    # Both may have ended between two looks of the runner: then the one that waited names the other.
    lost = re.search(r"PeerLost: rank (\d+)", "\n".join(lines.get(ended, ())))
    return int(lost[1]) if lost is not None and int(lost[1]) in lines else ended


def _recording_fault(run: Run) -> str | None:
    """Return why the recordings are not those of the method, or None."""
    recordings = run.recordings()
    if not recordings:
        return _NOTHING_RECORDED
    trained = {pair for recording in recordings for pair in recording.algorithms.items()}
    wanted = repr(run.method.algorithm)
    if others := sorted(text for exchanges, text in trained if exchanges != wanted):
        return (
            f"the script trained with {' and '.join(others)}, not with {run.method.text}; "
            "it must pass the algorithm that it is asked for to every replica: "
            "offbeat.algorithm(), or offbeat.algorithm(TEXT) with the text of --algorithm"
        )
    return None


def _clear_folder(folder: Path) -> Path:
    """Create the folder, or delete the files of an earlier run in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("rank*.jsonl"), folder / OUTPUT]:
        path.unlink(missing_ok=True)
    return folder


_UNSHAPED = "the network has no rate limit, ranks run over the loopback interface"
_NOTHING_RECORDED = (
    "the script exited with code 0, but some rank recorded no step; it must call "
    "offbeat.replicate(model, offbeat.algorithm()), and step() after every optimizer step"
)
# What argparse, click, absl, fire and the parser of transformers say to an option that a script
# does not have, or has with another meaning.
_REFUSED_OPTION = re.compile(
    r"(?i)^(?=.*(unrecogni|unknown|no such|not used|not consume|invalid)).*(--|')algorithm\b"
)
_USE_ENV_ONLY = (
    "If the script has no option --algorithm, let it call offbeat.algorithm() without a text, and "
    "add --env-only to offbeat compare: nothing is then added to the command line of the script."
)
