"""A reader of recordings, also of files that grow while a run is in progress."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, final

from offbeat.kit.warning import warn


@final
@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank, with those of its other replicas in that time."""

    time: float  # end of the step, in seconds since the epoch
    seconds: float
    bytes_sent: Mapping[str, float]  # by axis: "world", "node", "local"
    seconds_stalled: float
    replica: int = 0  # number of the replica in its process
    loss: float | None = None
    weight: float = 1.0  # of the loss among those of all ranks
    choosing: float = 0.0  # seconds before the step, in which the algorithm was chosen
    # (kind, start, end) in seconds since the start of the step; a message may start before it.
    spans: tuple[tuple[str, float, float], ...] = ()
    # Of a profile: when each gradient was ready, in seconds since the start of the step; the number
    # of values and the dtype of each parameter; the peak of memory in bytes; the kind of device.
    ready: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    memory: int | None = None
    device: str = "cpu"

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> "Step":
        """Build a step from a line of a recording; bytes without an axis count as "world"."""
        held = {field.name: line[field.name] for field in fields(cls) if field.name in line}
        held["bytes_sent"] = line.get("bytes_by_axis") or {"world": line["bytes_sent"]}
        held["spans"] = tuple(map(tuple, line.get("spans", ())))
        held["parameters"] = {n: tuple(p) for n, p in line.get("parameters", {}).items()}
        return cls(**held)

    def including(self, other: "Step") -> "Step":
        """Add bytes, stalls and spans of another replica's step, and its loss if this has none."""
        axes = {*self.bytes_sent, *other.bytes_sent}
        sent = {a: self.bytes_sent.get(a, 0) + other.bytes_sent.get(a, 0) for a in axes}
        later = (other.time - other.seconds) - (self.time - self.seconds)
        moved = ((kind, start + later, end + later) for kind, start, end in other.spans)
        reports = other if self.loss is None and other.loss is not None else self
        return replace(
            self,
            loss=reports.loss,
            weight=reports.weight,
            bytes_sent=sent,
            seconds_stalled=self.seconds_stalled + other.seconds_stalled,
            spans=(*self.spans, *moved),
        )

    def spans_of(self, kind: str) -> Iterator[tuple[float, float]]:
        """Yield start and end of all spans of a kind; "exchange" includes every axis."""
        for name, start, end in self.spans:
            if name.partition(":")[0] == kind:
                yield start, end


def mean_loss(steps: Iterable[Step]) -> float | None:
    """Return the weighted mean of the losses that there are; None without any that counts."""
    known = [(step.loss, step.weight) for step in steps if step.loss is not None and step.weight]
    return fmean(*zip(*known, strict=True)) if known else None


@final
@dataclass
class Recording:
    """The recording of one rank, as far as :meth:`update` has read it."""

    path: Path
    rank: int = 0
    nodes: tuple[tuple[int, ...], ...] = ()  # the ranks of each node
    algorithms: dict[str, str] = field(default_factory=dict)  # text, by repr(): of all replicas
    replicas: int = 0  # how many this rank has made
    steps: list[Step] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)  # (steps before it, loss)
    switches: list[tuple[int, str]] = field(default_factory=list)  # (steps before it, algorithm)
    # Mean distance of a replica's models from their average, at finish(), by the replica's number.
    distances: dict[int, float] = field(default_factory=dict)
    _offset: int = 0

    @property
    def distance(self) -> float | None:
        """The largest distance among the replicas of this process."""
        return max(self.distances.values(), default=None)

    def update(self) -> None:
        """Read the lines that have been completed since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(text) + len(newline)
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                warn(f"{self.path}: a line was cut off and is left out: {ascii(line)[:60]}")
            else:
                self._parse_event(event)

    def _parse_event(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "attached":
                self.rank, self.replicas = line["rank"], self.replicas + 1
                self.nodes = tuple(tuple(ranks) for ranks in line["nodes"])
                self.algorithms[line["exchanges"]] = line["algorithm"]
            case "switched":
                self.switches.append((len(self.steps), line["algorithm"]))
            case "step":
                self._add(Step.parse(line))
            case "heldout":
                self.heldout.append((len(self.steps), line["loss"]))
            case "finish":
                self.distances[line.get("replica", 0)] = line["consensus_distance"]["mean"]

    def _add(self, step: Step) -> None:
        """Add a step, or merge it into the last one, which is another replica's.

        If it began after the end of that step, then the replica of the last step has ended.
        """
        last = self.steps[-1] if self.steps else step
        if step.replica == last.replica or step.time - step.seconds >= last.time:
            self._extend_earlier_steps(step)
            self.steps.append(step)
        else:
            both = self.steps.pop().including(step)
            self._extend_earlier_steps(replace(both, spans=both.spans[len(last.spans) :]))
            self.steps.append(both)

    def _extend_earlier_steps(self, late: Step) -> None:
        """Add the spans of a message to the earlier steps during which it was in flight.

        A message is recorded by the step that waits for it, with a start before that step.
        """
        for kind, start, end in late.spans:
            for index in reversed(range(len(self.steps)) if start < 0 else ()):
                step = self.steps[index]
                gap = (late.time - late.seconds) - (step.time - step.seconds)
                if start + gap >= step.seconds:
                    break  # the message was sent after this step
                span = (kind, start + gap, end + gap)
                self.steps[index] = replace(step, spans=(*step.spans, span))


def read_run(folder: Path) -> list[Recording]:
    """Read the recordings in ``folder``, ordered by rank.

    Ranks that have not completed their first line are left out.
    """
    recordings = [Recording(path) for path in folder.glob("rank*.jsonl")]
    for recording in recordings:
        recording.update()
    return sorted((r for r in recordings if r.nodes), key=lambda r: r.rank)
