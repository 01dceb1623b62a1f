"""Messages of sparse gradients: the rows of tables that a step has touched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.exchange.engine.call_number import number_of, require_same_call
from offbeat.exchange.engine.dot_grad import gradient_of
from offbeat.exchange.engine.feedback import Feedback
from offbeat.exchange.engine.message import FeedbackMessage
from offbeat.functional import accumulation_dtype, all_finite
from offbeat.transport.collectives import all_gather, mean
from offbeat.transport.group import Group, message_device

_NONE = -1  # in place of a number of rows: no gradient


def _unchanged(name: str, values: Tensor) -> Tensor:
    return values


class Found(NamedTuple):
    """The mean of a table: its rows (m), ascending, and their values (m, ...)."""

    rows: Tensor
    values: Tensor


@final
class Rows(FeedbackMessage):
    r"""Sparse gradients that are averaged row by row; all is sent, nothing is left.

    .. math:: g_i = \sum_{p: i \in R_p} s_p g_{p,i}, \quad i \in \bigcup_p R_p

    with the rows R_p of a table that rank p has touched and its share s_p of the mean, 1/P if all
    are equal. ``.grad`` becomes a new sparse tensor with the same rows on all ranks. A row that was
    touched counts also if it is zero, as for :class:`torch.optim.SparseAdam`. Rows are added in the
    order of ranks, in float32 at least, and rounded once.

    Bytes sent for each table: 8 (P-1), and (P-1) m (d s + 4) for m rows of d entries of s bytes on
    the rank that has most; or 2 (P-1)/P n (d+1) s where that is less, for the dense mean of all n
    rows with a flag for each.

    ``correct`` changes the values of this rank's gradient, by name; ``narrow`` is the dtype in
    which wider ones are sent.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        narrow: torch.dtype | None = None,
        correct: Callable[[str, Tensor], Tensor] = _unchanged,
    ) -> None:
        super().__init__([name for name in site.parameters if name in site.sparse])
        self.site, self.group, self.correct = site, group, correct
        self.tables = {n: _Table.of(site.parameters[n], group, narrow) for n in self.names}
        self.feedback: dict[str, Feedback] = {}
        self.mine: dict[str, Found] = {}
        self.found: dict[str, Found] = {}

    def add(self, name: str, *, continues: bool) -> None:
        """Do nothing: gradients are read at the launch."""

    def launch(self) -> None:
        """Read the gradients, and launch a gather of how many rows each member has."""
        self.mine, self.found = {}, {}
        for name in self.names if self.site.factor > 0 else ():
            grad = gradient_of(self.site.registered[name])
            if grad is not None:
                self.mine[name] = self._read(name, grad)
        counts = [len(self.mine[n].rows) if n in self.mine else _NONE for n in self.names]
        said = torch.tensor(
            [*counts, number_of(self.group)], device=message_device(self.group), dtype=torch.int64
        )
        self.counts = said.new_empty(self.group.size, len(said))
        self.handle = all_gather(self.counts.view(-1), said, self.group)

    def wait(self) -> bool:
        """Exchange the rows, on all members in one order; return whether all are finite."""
        self.handle.wait()
        *counts, numbers = self.counts.T.tolist()
        require_same_call(self.group, number_of(self.group), *numbers)
        held = zip(self.names, counts, strict=True)
        launched = {n: self._launch(n, each) for n, each in held if max(each) != _NONE}
        self.found = {name: arrived() for name, arrived in launched.items()}
        return all_finite([found.values for found in self.found.values()])

    def commit(self) -> None:
        """Make the means ``.grad``, except where no member has a gradient."""
        for name in self.names:
            parameter, found = self.site.registered[name], self.found.get(name)
            if found is not None:
                rows, values = (part.to(parameter.device) for part in found)
                parameter.grad = torch.sparse_coo_tensor(
                    rows.long()[None],
                    values.to(parameter.dtype),
                    parameter.shape,
                    is_coalesced=True,
                    check_invariants=False,
                )
            elif not self.site.factor:
                parameter.grad = None
        self.mine, self.found = {}, {}

    def undo(self) -> None:
        """Set the values of every ``.grad`` to NaN."""
        for found in self.found.values():
            found.values.fill_(torch.nan)
        self.commit()

    def _read(self, name: str, grad: Tensor) -> Found:
        if grad.layout is not torch.sparse_coo or grad.requires_grad:
            raise self.group.detector.report_error(
                ValueError(
                    f"parameter {name!r} has a gradient of layout {grad.layout}, requires_grad="
                    f"{grad.requires_grad}, although sparse=True: a dense use, such as a tied "
                    "output layer, or create_graph; set sparse=False on its embedding"
                )
            )
        grad = grad.coalesce()
        return Found(grad.indices()[0], self.correct(name, grad.values()))

    def _launch(self, name: str, counts: Sequence[int]) -> Callable[[], Found]:
        table = self.tables[name]
        mine = self.mine.get(name) or Found(*table.room(0))
        shares = self.site.shares or (1.0 / self.group.size,) * self.group.size
        if table.is_smaller_whole(max(counts)):
            return table.launch_whole(mine, shares)
        return table.launch_rows(mine, [max(count, 0) for count in counts], shares)


@final
@dataclass(frozen=True, eq=False)
class _Table:
    """Sends the gradient of one parameter, whose values have ``dtype`` in messages."""

    shape: torch.Size
    dtype: torch.dtype
    group: Group
    device: torch.device

    @classmethod
    def of(cls, parameter: Tensor, group: Group, narrow: torch.dtype | None) -> "_Table":
        dtype = parameter.dtype
        if narrow is not None and narrow.itemsize < dtype.itemsize:
            dtype = narrow
        return cls(parameter.shape, dtype, group, message_device(group, parameter.device))

    def room(self, *sizes: int) -> tuple[Tensor, Tensor]:
        """Return zeros for the numbers and the values of rows."""
        index = torch.int32 if self.shape[0] < 2**31 else torch.int64
        return (
            torch.zeros(sizes, dtype=index, device=self.device),
            torch.zeros(*sizes, *self.shape[1:], dtype=self.dtype, device=self.device),
        )

    def is_smaller_whole(self, most: int) -> bool:
        """Return whether the dense gradient is fewer bytes than ``most`` rows of each member."""
        row = sum(part.nbytes for part in self.room(1))
        whole = (self.shape.numel() + self.shape[0]) * self.dtype.itemsize
        return 2 * whole < self.group.size * most * row

    def launch_whole(self, mine: Found, shares: Sequence[float]) -> Callable[[], Found]:
        """Launch the mean of all rows, followed by who has which."""
        end = self.shape.numel()
        flat = torch.zeros(end + self.shape[0], dtype=self.dtype, device=self.device)
        values, flags = flat[:end].view(self.shape), flat[end:]
        rows = mine.rows.to(self.device).long()
        values[rows] = mine.values.to(values)
        flags[rows] = 1
        handle = mean(flat, self.group, shares=shares)

        def arrived() -> Found:
            handle.wait()
            (rows,) = flags.nonzero(as_tuple=True)
            return Found(rows, values[rows])

        return arrived

    def launch_rows(
        self, mine: Found, counts: Sequence[int], shares: Sequence[float]
    ) -> Callable[[], Found]:
        """Launch a gather of the rows of all members, padded to the most that one has."""
        size, most = self.group.size, max(counts)
        rows, values = self.room(size, most)
        handles = []
        for everyone, part in ((rows, mine.rows), (values, mine.values)):
            everyone[self.group.rank, : len(part)] = part.to(everyone)
            if most:
                row = everyone[self.group.rank].view(-1)
                handles.append(all_gather(everyone.view(-1), row, self.group))

        def arrived() -> Found:
            for handle in handles:
                handle.wait()
            each = zip(rows, values, counts, strict=True)
            return _sum([Found(r[:n], v[:n]) for r, v, n in each], shares)

        return arrived


def _sum(parts: Sequence[Found], shares: Sequence[float]) -> Found:
    """Add up what members have of a table, multiplied by their shares."""
    values = parts[0].values
    rows, places = torch.cat([part.rows for part in parts]).unique(return_inverse=True)
    wide = accumulation_dtype(values.dtype)
    total = torch.zeros(len(rows), *values.shape[1:], dtype=wide, device=values.device)
    each = places.split([len(part.rows) for part in parts])
    for part, at, share in zip(parts, each, shares, strict=True):
        # Member after member: one call for all of them would add equal rows in any order on a GPU,
        # and ranks would differ by rounding.
        total.index_add_(0, at, part.values.to(wide), alpha=share)
    return Found(rows, total)
