"""Reading what the ranks record: files that grow while a run goes on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

# Kind; start and end in seconds from the start of the step, which may lie outside of it.
Span = tuple[str, float, float]


@final
@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank."""

    time: float  # of day, when it ended
    seconds: float
    bytes_sent: Mapping[str, float]  # by axis: "world", "node", "local"
    seconds_stalled: float
    loss: float | None = None
    spans: tuple[Span, ...] = ()

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> "Step":
        """Read one line; bytes that are not told by axis count as "world"."""
        return cls(
            time=line["time"],
            seconds=line["seconds"],
            bytes_sent=line.get("bytes_by_axis") or {"world": line["bytes_sent"]},
            seconds_stalled=line["seconds_stalled"],
            loss=line.get("loss"),
            spans=tuple((kind, start, end) for kind, start, end in line.get("spans", ())),
        )

    def intervals(self, kind: str) -> Iterator[tuple[float, float]]:
        """Start and end of all spans of a kind; "exchange" stands for every axis."""
        for name, start, end in self.spans:
            if name.partition(":")[0] == kind:
                yield start, end


@final
@dataclass
class Recording:
    """One rank's file, as far as it was read."""

    path: Path
    rank: int = 0
    nodes: tuple[tuple[int, ...], ...] = ()  # the ranks of each node
    steps: list[Step] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)  # steps before it, loss
    distance: float | None = None  # of the replicas, when finish() was called
    _offset: int = 0

    def update(self) -> None:
        """Read the lines that were completed since the last time."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(text) + len(newline)
        for line in text.splitlines():
            self._parse_event(json.loads(line))

    def _parse_event(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "attached":
                self.rank = line["rank"]
                self.nodes = tuple(tuple(ranks) for ranks in line["nodes"])
            case "step":
                step = Step.parse(line)
                self._extend_earlier_steps(step)
                self.steps.append(step)
            case "heldout":
                self.heldout.append((len(self.steps), line["loss"]))
            case "finish":
                self.distance = line["consensus_distance"]["mean"]

    def _extend_earlier_steps(self, late: Step) -> None:
        """A message is written down by the step that waited for it: add it to those before."""
        for kind, start, end in late.spans:
            for index in reversed(range(len(self.steps)) if start < 0 else ()):
                step = self.steps[index]
                gap = (late.time - late.seconds) - (step.time - step.seconds)
                if start + gap >= step.seconds:
                    break  # it left after this step
                span = (kind, start + gap, end + gap)
                self.steps[index] = replace(step, spans=(*step.spans, span))


def read_run(folder: Path) -> list[Recording]:
    """The recordings of all ranks that have begun one, in the order of ranks."""
    recordings = [Recording(path) for path in folder.glob("rank*.jsonl")]
    for recording in recordings:
        recording.update()
    return sorted((r for r in recordings if r.nodes), key=lambda r: r.rank)
