"""The part of every layer that one rank exchanges."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from offbeat.functional import Layout, Segments
from offbeat.parameters.adasum.participants import Participants

# Bytes of a share that travel while the ones before are worked on: a quarter of it within these.
# Without a limit, where every message costs what all cores have to do, 1 MiB between 2 nodes takes
# 4.6 x Gloo's all-reduce in one run and 5.7 x in two, 4 MiB between 4 nodes 2.9 and 3.4 x. At
# 250 Mbit/s between 8 nodes both take the same.
SMALLEST, LARGEST = 2**19, 2**20


@dataclass(frozen=True)
class Piece:
    """A run of one section of a slice: ``slices[section][start:stop]``."""

    section: int
    start: int
    stop: int

    def of(self, slices: Sequence[Tensor]) -> Tensor:
        """This run of the given slices."""
        return slices[self.section][self.start : self.stop]


@dataclass(frozen=True, eq=False)
class SliceLayout:
    """Slice ``index`` of all layers that ``layout`` places, exchanged between ``peers``.

    The length of a slice is a multiple of the number of peers, and each combines an equal share
    of every section. Slices beyond the layout's, on ranks that only receive, hold no layers.
    """

    layout: Layout
    peers: Participants
    index: int = 0

    @property
    def layers(self) -> int:
        """The number of layers, whether they reach into this slice or not."""
        return len(self.layout.places)

    @property
    def lengths(self) -> list[int]:
        """The elements of this slice in each section."""
        return [numel // self.peers.slices for numel in self.layout.numels]

    def spans(self, piece: Piece) -> Segments:
        """Whose elements lie in a piece."""
        first = self.index * self.lengths[piece.section]
        return self.layout.spans(piece.section, first + piece.start, first + piece.stop)

    def share(self) -> list[Piece]:
        """What one peer combines of each section, counted from the start of its share."""
        return [Piece(i, 0, length // self.peers.size) for i, length in enumerate(self.lengths)]

    def runs(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Pieces that start at 0 in parts that travel one after the other."""
        found = []
        for section, _, width in map(astuple, pieces):
            itemsize = self.layout.dtypes[section].itemsize
            size = min(max(width * itemsize // 4, SMALLEST), LARGEST)
            step = max(1, size // itemsize)
            found += [Piece(section, a, min(a + step, width)) for a in range(0, width, step)]
        return found

    def placed(self, run: Piece, rank: int) -> Piece:
        """Where a run of the share of the peer ``rank`` lies in the slice."""
        start = rank * (self.lengths[run.section] // self.peers.size)
        return Piece(run.section, start + run.start, start + run.stop)

    def whole(self) -> list[Piece]:
        """Each section of the slice as one piece."""
        return [Piece(section, 0, length) for section, length in enumerate(self.lengths)]
