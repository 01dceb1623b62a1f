"""What ranks exchange of a model: its parameters and buffers, except those to ignore."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar, final

from torch import Tensor, nn

from offbeat.exchange.sharding import gathering_modules, is_sharded, local

Held = TypeVar("Held", bound=Tensor)


@final
@dataclass(frozen=True, eq=False)
class Exchanged:
    """The parameters and buffers of ``module`` that ranks exchange, by name.

    ``ignore`` holds names of parameters, buffers and modules, and modules; it is extended by what
    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` was given, of which
    names that the model does not have are skipped. A parameter with several names is ignored if one
    of them is.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    >>> [*Exchanged(model, ["0", "1.weight"]).parameters]
    ['1.bias']
    """

    module: nn.Module
    ignore: Collection[str | nn.Module] = ()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, as the model registers them."""
        return self._kept(self.module.named_parameters())

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that were not frozen when first asked for: at the attach.

        One that is frozen later stays a part of what ranks exchange, or ranks that fill their slots
        anew, after a loss or a switch, would leave it out.
        """
        return {name: p for name, p in self.parameters.items() if name in self._trained}

    @cached_property
    def _trained(self) -> frozenset[str]:
        return frozenset(name for name, p in self.parameters.items() if p.requires_grad)

    @property
    def held(self) -> dict[str, Tensor]:
        """What this rank holds of the parameters."""
        return {name: local(p) for name, p in self.parameters.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers."""
        return self._kept(self.module.named_buffers())

    @cached_property
    def kinds(self) -> dict[str, Tensor]:
        """The buffers as they were when first asked for, without values: at the attach."""
        return {name: buffer.detach().to("meta") for name, buffer in self.buffers.items()}

    @property
    def ignored(self) -> dict[str, Tensor]:
        """The other parameters and buffers, which are this rank's own."""
        return {n: t for n, t in self._named() if f"{n}.".startswith(self._prefixes)}

    @property
    def sparse(self) -> frozenset[str]:
        """The trained parameters whose gradients are sparse, as their embeddings say.

        >>> [*Exchanged(nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1))).sparse]
        ['0.weight']
        """
        tables = (m for m in self.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        sparse = {id(table.weight) for table in tables if table.sparse}
        return frozenset(name for name, p in self.trained.items() if id(p) in sparse)

    @property
    def own(self) -> list[nn.Parameter]:
        """The ignored parameters that are not frozen."""
        named, ignored = self.module.named_parameters(), self.ignored
        return [p for name, p in named if p.requires_grad and name in ignored]

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are divided among ranks."""
        return any(map(is_sharded, self.parameters.values()))

    def reshard(self) -> None:
        """Free the gathered copies of parameters, before their shards are written."""
        # FSDP2 keeps those of the root after a forward without a backward, as in an evaluation. The
        # next forward would use them, and not what was written.
        for module in self._gathering:
            module.reshard()

    def fault(self) -> str | None:
        """Return why ``ignore`` is no list of parts of the model, or None."""
        if isinstance(self.ignore, str | nn.Module) or not isinstance(self.ignore, Collection):
            return f"ignore is a {type(self.ignore).__name__}, expected a list of names and modules"
        for part in self.ignore:
            if self._names_of(part):
                continue
            if not isinstance(part, str):
                return (
                    f"ignore has a {type(part).__name__} that is no module of the model; give "
                    "modules, or names of parameters, buffers and modules"
                )
            near = get_close_matches(part, self._names) or self._names[:3]
            return (
                f"{part!r} is to be ignored and is no parameter, buffer or module of the model; "
                f"near names are {', '.join(map(repr, near))}"
            )
        return None

    def _kept(self, named: Iterable[tuple[str, Held]]) -> dict[str, Held]:
        return {n: t for n, t in named if not f"{n}.".startswith(self._prefixes)}

    def _named(self, remove_duplicate: bool = True) -> Iterable[tuple[str, Tensor]]:
        return chain(
            self.module.named_parameters(remove_duplicate=remove_duplicate),
            self.module.named_buffers(remove_duplicate=remove_duplicate),
        )

    @cached_property
    def _gathering(self) -> list[Any]:
        return gathering_modules(self.module)

    @cached_property
    def _names(self) -> list[str]:
        modules = self.module.named_modules(remove_duplicate=False)
        return [name for name, _ in (*self._named(False), *modules) if name]

    def _names_of(self, part: str | nn.Module) -> list[str]:
        if isinstance(part, nn.Module):
            return [n for n, m in self.module.named_modules(remove_duplicate=False) if m is part]
        return [part] if part in self._names else []

    @cached_property
    def _prefixes(self) -> tuple[str, ...]:
        """How the names of what is ignored begin, if a dot is put behind each."""
        every = [*self._named(False)]
        names = [name for part in self.ignore for name in self._names_of(part)]
        # As DistributedDataParallel reads it: names of tensors, in which torch's docstring puts a
        # dot before those of the outermost module.
        marked = {*getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())}
        names += [name for name, _ in every if {name, f".{name}"} & marked]
        given = tuple(f"{name}." if name else "" for name in names)
        tied = {id(tensor) for name, tensor in every if f"{name}.".startswith(given)}
        return given + tuple(f"{name}." for name, tensor in every if id(tensor) in tied)
