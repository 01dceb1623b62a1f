"""The slice of every layer that one rank exchanges, and its division into messages."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from offbeat.functional import Layout, Segments
from offbeat.methods.adasum.participants import Participants

# Bytes of a run: a share is sent in runs, so that one is in flight while the last is processed. A
# run is a quarter of the share within these limits. On links without a limit each message costs
# CPU time: 1 MiB between 2 nodes takes 4.6 x Gloo's all-reduce as one run and 5.7 x as two, 4 MiB
# between 4 nodes 2.9 and 3.4 x. At 250 Mbit/s between 8 nodes both take the same.
SMALLEST, LARGEST = 2**19, 2**20


@dataclass(frozen=True)
class Piece:
    """A run of one section of a slice: ``slices[section][start:stop]``."""

    section: int
    start: int
    stop: int

    def of(self, slices: Sequence[Tensor]) -> Tensor:
        """Return this run of the given slices, (stop - start,)."""
        return slices[self.section][self.start : self.stop]


@dataclass(frozen=True, eq=False)
class SliceLayout:
    """Slice ``index`` of all layers of ``layout``, exchanged between ``participants``."""

    layout: Layout
    participants: Participants  # each combines an equal share of every section
    index: int = 0  # beyond the layout's slices, on ranks that only receive, they hold no layers

    @property
    def layers(self) -> int:
        """The number of layers, including those outside of this slice."""
        return len(self.layout.places)

    @property
    def lengths(self) -> list[int]:
        """The number of elements of this slice in each section."""
        return [numel // self.participants.slices for numel in self.layout.numels]

    def segments(self, piece: Piece) -> Segments:
        """Return which layers' elements a piece holds."""
        first = self.index * self.lengths[piece.section]
        return self.layout.segments(piece.section, first + piece.start, first + piece.stop)

    def share(self) -> list[Piece]:
        """Return what one participant combines of each section, relative to its share."""
        return [
            Piece(i, 0, length // self.participants.size) for i, length in enumerate(self.lengths)
        ]

    def runs(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Divide pieces that start at 0 into runs that are sent one after the other."""
        found = []
        for section, _, width in map(astuple, pieces):
            itemsize = self.layout.dtypes[section].itemsize
            size = min(max(width * itemsize // 4, SMALLEST), LARGEST)
            step = max(1, size // itemsize)
            found += [Piece(section, a, min(a + step, width)) for a in range(0, width, step)]
        return found

    def placed(self, run: Piece, rank: int) -> Piece:
        """Return the position in the slice of a run of the share of participant ``rank``."""
        start = rank * (self.lengths[run.section] // self.participants.size)
        return Piece(run.section, start + run.start, start + run.stop)

    def whole(self) -> list[Piece]:
        """Return each section of the slice as one piece."""
        return [Piece(section, 0, length) for section, length in enumerate(self.lengths)]
