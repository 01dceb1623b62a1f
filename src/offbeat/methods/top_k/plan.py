"""The plan of messages: which layers are sent dense, and the density of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.exchange import Site
from offbeat.exchange.engine.bucket import BUCKET, in_buckets
from offbeat.functional import runs_within
from offbeat.functional.cost import INDEX
from offbeat.functional.messages.sixteen_bits import Sixteen
from offbeat.methods.top_k.payload import kept_entries, value_dtype

Block = tuple[tuple[str, ...], int]  # parameters, and how many of their entries are sent; 0: all


@dataclass(frozen=True)
class MessagePlan:
    """Density of each layer; two plans are equal if they send the same."""

    site: Site = field(compare=False)
    densities: Mapping[str, float]
    message_mb: float  # of a sparse message
    wire: Sixteen | None = None
    whole: bool = False  # select among all entries of a dtype, not of each parameter

    def dense(self, order: Sequence[str]) -> list[list[str]]:
        """Return the parameters of each dense message, filled in this order."""
        names = [name for members, k in self._blocks(order) if not k for name in members]
        sizes = {name: self.site.parameters[name].nbytes for name in names}
        return in_buckets(sizes, {n: self.site.parameters[n].dtype for n in names}, BUCKET)

    def sparse(self, order: Sequence[str]) -> list[list[Block]]:
        """Return the blocks of each sparse message, filled in this order."""
        blocks = [
            (self.site.parameters[names[0]].dtype, (names, k))
            for names, k in self._blocks(order)
            if k
        ]
        most, messages = int(self.message_mb * 2**20), []
        for dtype in dict.fromkeys(dtype for dtype, _ in blocks):
            members = [block for own, block in blocks if own == dtype]
            entry = value_dtype(dtype, self.wire).itemsize + INDEX
            runs = runs_within([k * entry for _, k in members], most, most)
            messages += [[members[index] for index in run] for run in runs]
        return messages

    def density_of(self, name: str) -> float:
        """Return the share of a layer that is sent; 1 if all is."""
        k = 0 if name in self.site.sparse else self._kept([name])
        return k / self.site.parameters[name].numel() if k else 1.0

    def _blocks(self, order: Sequence[str]) -> list[Block]:
        """Return runs of parameters whose entries compete; none of those sent as rows."""
        order = [name for name in order if name not in self.site.sparse]
        if not self.whole:
            return [((name,), self._kept([name])) for name in order]
        dtypes = dict.fromkeys(self.site.parameters[name].dtype for name in order)
        runs = [tuple(n for n in order if self.site.parameters[n].dtype == d) for d in dtypes]
        return [(names, self._kept(names)) for names in runs]

    def _kept(self, names: Sequence[str]) -> int:
        """Return how many entries are sent; 0 where sending all costs no more."""
        parameters = [self.site.parameters[name] for name in names]
        numel = sum(parameter.numel() for parameter in parameters)
        density, dtype = self.densities[names[0]], parameters[0].dtype
        return kept_entries(numel, density, dtype, self.site.size, self.wire)
