"""Carrying out a plan: every run in its turn, with a folder of its own."""

import re
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

from offbeat.compare.experiment import Experiment, Method
from offbeat.lab import Lab, Loopback, Runner, Unavailable
from offbeat.telemetry.recorder import FOLDER
from offbeat.telemetry.recording import Recording, read_run

LAST_LINES = 15
OUTPUT = "output.txt"  # of all ranks of a run, beside their recordings


@final
@dataclass
class Run:
    """A method's run in one round. ``code`` is None while it goes on, or if it was interrupted."""

    method: Method
    round: int
    folder: Path
    code: int | None = None
    failed_rank: int | None = None
    last_lines: list[str] = field(default_factory=list)  # of the rank that failed

    @property
    def failure(self) -> str | None:
        """Why it failed, in words; None if it did not."""
        if self.code in (None, 0):
            return None
        who = "" if self.failed_rank is None else f"rank {self.failed_rank}, "
        return f"round {self.round}, {who}exit code {self.code}"

    def recordings(self) -> list[Recording]:
        """Those of all ranks; none, unless each has recorded a step."""
        found = [recording for recording in read_run(self.folder) if recording.steps]
        expected = {rank for recording in found[:1] for ranks in recording.nodes for rank in ranks}
        return found if {recording.rank for recording in found} == expected else []


class Watch(Protocol):
    """Who is told how a comparison goes on."""

    def following(self, run: Run) -> AbstractContextManager[None]:
        """Entered while ``run`` goes on."""


@contextmanager
def open_runner(
    nodes: int, procs_per_node: list[int] | int, rate: str | None
) -> Iterator[tuple[Runner, str | None]]:
    """Where all runs take place, and why the network is not shaped, if it is not.

    Raises ValueError for nodes or a rate that cannot be.
    """
    with ExitStack() as stack:
        lab, reason = Lab(nodes, procs_per_node, rate), "no --rate was given"
        try:
            place: Runner | None = stack.enter_context(lab) if rate is not None else None
        except Unavailable as error:
            place, reason = None, str(error)
        if place is not None:
            yield place, None
        else:
            yield stack.enter_context(Loopback(nodes, procs_per_node)), f"{_UNSHAPED}: {reason}"


def carry_out(plan: Experiment, place: Runner, folder: Path, runs: list[Run], watch: Watch) -> None:
    """Run everything in ``place``, which has been entered, and append each run to ``runs``.

    A method that fails is not started again. On Ctrl-C the run that goes on is the last one, its
    ``code`` None.
    """
    for old in folder.glob("round*/*"):
        _emptied(old)
    failed: set[Method] = set()
    for turn in plan.turns():
        if turn.method in failed:
            continue
        number = plan.methods.index(turn.method)
        home = folder / f"round{turn.round}" / f"{number}-{turn.method.slug}"
        runs.append(run := Run(turn.method, turn.round, _emptied(home)))
        with watch.following(run):
            _start(run, plan, place)
        if run.failure:
            failed.add(turn.method)


def _start(run: Run, plan: Experiment, place: Runner) -> None:
    lines: dict[int | None, deque[str]] = {}
    with (run.folder / OUTPUT).open("w", encoding="utf-8") as output:

        def keep(rank: int | None, line: str) -> None:
            lines.setdefault(rank, deque(maxlen=LAST_LINES)).append(line)
            output.write(f"[{'lab' if rank is None else rank}] {line}\n")

        env = {FOLDER: str(run.folder.absolute())}
        code = place.run(plan.command(run.method), env=env, on_line=keep)
    if code != 0:
        # The lab says who was first; those that lost their peer may have more to say.
        said = re.search(r"rank (\d+) failed", "\n".join(lines.get(None, ())))
        run.failed_rank = int(said[1]) if said else None
        run.last_lines = list(lines.get(run.failed_rank, ()))
    elif not run.recordings():
        code, run.last_lines = 1, [_NOTHING_RECORDED]
    run.code = code


def _emptied(folder: Path) -> Path:
    """The folder, made, without what an earlier comparison recorded there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("rank*.jsonl"), folder / OUTPUT]:
        path.unlink(missing_ok=True)
    return folder


_UNSHAPED = "the network is not shaped, ranks talk over this machine's loopback"
_NOTHING_RECORDED = (
    "the script ended well but recorded no step on some rank; it must call "
    "offbeat.replicate(model, offbeat.algorithm(TEXT)) and step() after every optimizer step"
)
