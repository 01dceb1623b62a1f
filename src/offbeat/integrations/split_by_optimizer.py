"""The part of a model that one of several optimizers trains."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.exchange import Exchanged
from offbeat.platform.privates import ignore_in_ddp


def parts_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Divide a model between its optimizers: one module for each, to be replicated on its own.

    The parts hold the parameters and buffers of ``model`` under the names that they have there;
    they cannot be called. The first part also holds what none of these optimizers trains. A single
    optimizer gets the whole model.

    Raises ``ValueError`` if two optimizers share a parameter.

    >>> import torch
    >>> gan = nn.ModuleDict({"g": nn.Linear(1, 2), "d": nn.Linear(2, 1)})
    >>> optimizers = [torch.optim.SGD(gan[name].parameters(), lr=0.1) for name in "gd"]
    >>> [[name for name, _ in part.named_parameters()] for part in parts_of(gan, optimizers)]
    [['g.weight', 'g.bias'], ['d.weight', 'd.bias']]
    """
    if len(optimizers) == 1:
        return [model]
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in _held(optimizer):
            if owners.setdefault(id(parameter), number) != number:
                name = next((n for n, p in model.named_parameters() if p is parameter), "?")
                raise ValueError(
                    f"optimizers {owners[id(parameter)]} and {number} share {name!r}; each has a "
                    "replica, which exchanges after its steps: give each parameter to one optimizer"
                )
    parts = [nn.Module() for _ in optimizers]
    for path, module in model.named_modules():
        own = {name: owners.get(id(p), 0) for name, p in module._parameters.items()}
        for number in {*own.values()} or {0}:
            place = _place(parts[number], path)
            place._parameters = {n: p for n, p in module._parameters.items() if own[n] == number}
        # Buffers go with the parameters beside them; shared dicts, since buffers are reassigned.
        place = _place(parts[min(own.values(), default=0)], path)
        place._buffers = module._buffers
        place._non_persistent_buffers_set = module._non_persistent_buffers_set
    ignored = Exchanged(model).ignored
    for part in parts:
        names = [name for name, _ in (*part.named_parameters(), *part.named_buffers())]
        ignore_in_ddp(part, [name for name in names if name in ignored])
    return parts


def exchanging(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers of parameters that ranks exchange; the others need no replica."""
    exchanged = {id(p) for p in Exchanged(model).trained.values()}
    return [o for o in optimizers if not exchanged.isdisjoint(map(id, _held(o)))]


def _held(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _place(part: nn.Module, path: str) -> nn.Module:
    """Return the module at ``path``, made if it is missing."""
    for name in path.split(".") if path else ():
        if name not in part._modules:
            part.add_module(name, nn.Module())
        part = part.get_submodule(name)
    return part
