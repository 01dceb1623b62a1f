"""What an exchange keeps about one replica, declared by name and by what it means."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from offbeat.exchange.site import Site
from offbeat.functional import Layout, pack

Saved = dict[str, Any]  # nested dicts of tensors and plain values: torch.load(weights_only=True)
Kind = Literal["own", "shared", "derived", "in_flight", "scratch"]


def _fits(value: Any) -> None:
    """Accept any value of the right structure."""


def _nothing(*value: Any) -> Any:
    """Stand for the reader and the writer of what is not saved."""


@dataclass(frozen=True, eq=False)
class Variable:
    """Declares one part of the state of an exchange.

    Attributes:
        name: its name in a saved state, fixed for as long as checkpoints are supported.
        kind: "own" differs by rank (a residual, an anchor, a weight); "shared" is equal on all
            members (a counter, a schedule, outer momentum); "derived" follows from the parameters
            between steps, and is not saved; "in_flight" was launched and is not
            merged yet; "scratch" is a buffer: memory, and never saved.
        read: returns the value to save, plain or tensors by parameter name, equal in names, shapes
            and kinds at all times; lists may differ in length.
        write: restores what ``read`` returned. It must not fail for what ``fault`` accepts.
        fault: returns why a saved value of the right structure cannot be, or None.
        memory: the tensors that it holds.
        parts: the declarations of what it consists of, if it is a state of its own.
        is_compared: whether a load is refused where ranks differ in the saved value. Not of shared
            tensors: between nodes ranks hold different slices of them.
    """

    name: str
    kind: Kind
    read: Callable[[], Any] = _nothing
    write: Callable[[Any], None] = _nothing
    fault: Callable[[Any], str | None] = _fits
    memory: Sequence[Tensor] = ()
    parts: "State | None" = None
    is_compared: bool = False


class State:
    """What follows from the declarations, for every exchange alike."""

    def state(self) -> Iterator[Variable]:
        """Yield the declarations; none by default."""
        yield from ()

    def save(self) -> Saved:
        """Return what a resumed run needs to continue bit for bit; no communication."""
        return {variable.name: variable.read() for variable in self._saved()}

    def unfit(self, saved: Saved) -> str | None:
        """Return why :meth:`load` cannot take ``saved`` over, or None; no communication.

        Names, shapes and kinds of values are those of :meth:`save`, and tensors are finite.
        """
        for variable in self._saved():
            if (fault := variable.fault(saved[variable.name])) is not None:
                return f"{variable.name!r}: {fault}"
        return None

    def shared(self, saved: Saved) -> Saved:
        """Return by path the part of a saved state that is compared between the members."""
        found: Saved = {}
        for variable in self._saved():
            value = saved[variable.name]
            if variable.parts is not None:
                parts = variable.parts.shared(value)
                found |= {f"{variable.name}.{name}": part for name, part in parts.items()}
            elif variable.is_compared:
                found[variable.name] = value
        return found

    def load(self, saved: Saved) -> None:
        """Restore what :meth:`save` returned; :meth:`unfit` has accepted it on all ranks."""
        for variable in self._saved():
            variable.write(saved[variable.name])

    def undo(self) -> None:
        """Undo what an exchange has changed that a loss has interrupted, in an elastic run."""

    def take(self, earlier: "State") -> None:
        """Take over an exchange of the same kind, and nothing in flight."""
        earlier.undo()
        for mine, before in zip(self.state(), earlier.state(), strict=True):
            if mine.parts is not None and before.parts is not None:
                mine.parts.take(before.parts)
            elif mine.kind in ("own", "shared", "derived"):
                mine.write(before.read())

    def common(self) -> Saved:
        """Return what a rank that joins gets, in the middle of a step: not what is "own"."""
        found: Saved = {}
        for variable in self.state():
            if variable.parts is not None:
                found[variable.name] = variable.parts.common()
            elif variable.kind in ("shared", "derived"):
                found[variable.name] = variable.read()
        return found

    def begin_with(self, common: Saved) -> None:
        """Take over what :meth:`common` has returned on another rank."""
        for variable in self.state():
            if variable.parts is not None:
                variable.parts.begin_with(common[variable.name])
            elif variable.name in common:
                variable.write(common[variable.name])

    def unsent(self) -> list[Tensor]:
        """Return copies of what this rank alone holds, and shares out when it leaves.

        A sum of it over the ranks counts, such as that of residuals. Nothing is in flight.
        """
        return []

    def add_unsent(self, shares: Sequence[Tensor]) -> None:
        """Add this rank's share of what :meth:`unsent` has returned on one that leaves."""

    def detach(self) -> None:
        """Remove what binding the exchange has attached to the model."""

    def nbytes(self) -> int:
        """Return the memory that the exchange holds between steps, in bytes."""
        held = {t.untyped_storage()._cdata: t for t in self._memory()}
        return sum(tensor.untyped_storage().nbytes() for tensor in held.values())

    def _memory(self) -> Iterator[Tensor]:
        for variable in self.state():
            yield from variable.memory if variable.parts is None else variable.parts._memory()

    def _saved(self) -> Iterator[Variable]:
        return (
            variable for variable in self.state() if variable.kind not in ("derived", "scratch")
        )


def count_fault(count: int) -> str | None:
    """Return why a saved value is no count, or None."""
    return None if count >= 0 else f"the count is {count}, expected 0 or more"


def scratch(name: str, memory: Sequence[Tensor]) -> Variable:
    """Declare buffers."""
    return Variable(name, "scratch", memory=memory)


def plain(
    kind: Kind,
    owner: Any,
    attribute: str,
    fault: Callable[[Any], str | None] = _fits,
    name: str | None = None,
) -> Variable:
    """Declare an attribute of ``owner``: a bool, an int, a float or a list, saved as ``name``."""
    value = getattr(owner, attribute)
    # Not its own type: a weight that a topology has multiplied may be a number of numpy.
    kept = next(kind for kind in (bool, int, float, list) if isinstance(value, kind))
    return Variable(
        name or attribute,
        kind,
        read=lambda: kept(getattr(owner, attribute)),
        write=lambda value: setattr(owner, attribute, kept(value)),
        fault=fault,
        is_compared=kind == "shared",
    )


def tensors(
    kind: Kind, name: str, views: Mapping[str, Tensor], memory: Sequence[Tensor]
) -> Variable:
    """Declare flat tensors, saved as their ``views`` by parameter name."""
    return Variable(
        name,
        kind,
        read=lambda: {name: view.to("cpu", copy=True) for name, view in views.items()},
        write=lambda saved: pack(views.values(), [saved[name] for name in views]),
        memory=memory,
    )


def nested(name: str, parts: State) -> Variable:
    """Declare a state that has declarations of its own."""
    return Variable(name, "own", parts.save, parts.load, parts.unfit, parts=parts)


def sections(
    kind: Kind, name: str, memory: Sequence[Tensor], site: Site, layout: Layout
) -> Variable:
    """Declare this rank's slices of flat sections, saved by parameter name in the dtype of sums."""
    return Variable(
        name,
        kind,
        read=lambda: by_name(site, layout, memory) if memory else {},
        write=lambda named: pack(memory, slices_of(site, layout, named)) if memory else None,
        memory=memory,
    )


def by_name(site: Site, layout: Layout, slices: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return copies by parameter name, in the dtype of sums, with zeros outside of the slices."""
    flat = layout.wide("cpu", site.chunks)
    pack([site.slice(part) for part in flat], slices)
    return layout.views(flat)


def empty_slices(site: Site, layout: Layout) -> list[Tensor]:
    """Return zeros for this rank's slices, flat by section, in the dtype of sums."""
    return [site.slice(part).clone() for part in layout.wide(site.device, site.chunks)]


def slices_of(site: Site, layout: Layout, named: Mapping[str, Tensor]) -> list[Tensor]:
    """Return this rank's slices of what :func:`by_name` returned."""
    flat = layout.wide(site.device, site.chunks)
    views = layout.views(flat)
    pack(views.values(), [named[name] for name in views])
    return [site.slice(part) for part in flat]
