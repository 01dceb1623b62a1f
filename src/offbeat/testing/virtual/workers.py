"""Workers that are rows of one tensor: their gradients, their optimizer, and their exchange."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import SGD, Optimizer

from offbeat.exchange import Algorithm
from offbeat.functional import distances_to_mean
from offbeat.methods import AdasumUpdate, Average, Mean, PushSum, StaleAverage, TopK
from offbeat.testing.virtual.adasum import AdasumRule
from offbeat.testing.virtual.means import AverageRule, MeanRule
from offbeat.testing.virtual.push_sum import PushSumRule
from offbeat.testing.virtual.rows import Rows
from offbeat.testing.virtual.stale_average import StaleAverageRule
from offbeat.testing.virtual.top_k import TopKRule

# What the methods do with the rows of all workers at once: with their gradients after backward, or
# with their parameters in place after the optimizer step.
GRADIENT_RULES: dict[type, Any] = {Mean: MeanRule, TopK: TopKRule}
PARAMETER_RULES: dict[type, Any] = {
    Average: AverageRule,
    PushSum: PushSumRule,
    AdasumUpdate: AdasumRule,
    StaleAverage: StaleAverageRule,
}


@final
class VirtualWorkers:
    r"""Trains n copies of a small model under an algorithm, as rows of one tensor.

    Every worker's gradient, optimizer step and exchange are computed at once, in the order of a
    real step: gradients, the gradients slot, the optimizer, the parameters slot. Parameters equal
    those of :func:`offbeat.testing.simulate` up to the order of sums. Nothing is sent, so nothing
    is said about time.

    Args:
        algorithm: what a recipe returns: ``ddp``, ``lags``, ``slgs``, ``local_sgd``, ``sgp``,
            ``d_psgd``, ``adasum``, ``daso`` or ``alone``, in full precision (``daso`` also with its
            16-bit averages).
        model: its parameters, of one dtype, are where all workers start. Buffers keep their
            values; nothing in it may be random, such as dropout.
        size: the number of workers n, each on a node of its own.
        nodes: instead of ``size``, the workers of each node.
        optimizer: builds an optimizer that treats every element of a parameter by itself; the
            default is SGD with a rate of 0.1.

    Memory: n models each for parameters, gradients, the optimizer's state and what the method
    keeps. Raises ``ValueError`` for algorithms and settings that are not simulated.

    >>> import offbeat
    >>> workers = VirtualWorkers(offbeat.sgp(), nn.Linear(1, 1, bias=False), size=1024)
    >>> inputs = torch.ones(1024, 1)
    >>> loss = lambda model, x: (model(x) - x).square().sum()
    >>> losses = [workers.step(loss, inputs).mean().item() for _ in range(20)]
    >>> losses[-1] < losses[0] / 100
    True
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        *,
        size: int = 0,
        nodes: Sequence[Sequence[int]] | None = None,
        optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, lr=0.1),
    ) -> None:
        """Copy the parameters into every row."""
        if algorithm.then is not None or algorithm.auto is not None:
            raise ValueError(
                f"{algorithm} changes its exchanges, which is not simulated; use one algorithm, or "
                "offbeat.testing.simulate"
            )
        rows = Rows(nodes or [[worker] for worker in range(size)], _layers(model))
        if (fault := _fault(model, rows, size if nodes else 0)) is not None:
            raise ValueError(fault)
        self.model, self.size, self.steps = model, len(rows.workers), 0
        trained = _trained(model)
        start = torch.cat([parameter.detach().reshape(-1) for parameter in trained.values()])
        self.rows = nn.Parameter(start.repeat(self.size, 1))
        self._shapes = {name: parameter.shape for name, parameter in trained.items()}
        self._layout, self._optimizer = rows, optimizer([self.rows])
        x = self.rows.detach()
        self._gradients = _rule(GRADIENT_RULES, algorithm.gradients, rows, x)
        self._parameters = _rule(PARAMETER_RULES, algorithm.parameters, rows, x)

    def step(self, loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Train one step; return the loss of each worker (n,) before it.

        Args:
            loss: called with a function that calls the model, and with one worker's part of each
                of ``inputs``. It is vmapped: no Python code in it may depend on values.
            inputs: tensors (n, ...).
        """
        grads, losses = self._backward(loss, inputs)
        with torch.no_grad():
            self.rows.grad = self._gradients.combine(grads) if self._gradients else grads
            self._optimizer.step()
            if self._parameters:
                self._parameters.step(self.rows.detach(), self.steps)
        self.steps += 1
        return losses

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all workers by name, (n, ...), as views."""
        return self._views(self.rows.detach())

    def distance(self) -> tuple[float, float]:
        """Return the mean and maximum L2 distance of the workers to their average."""
        return distances_to_mean(self.rows.detach())

    def _backward(
        self, loss: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        def of_one(row: Tensor, *parts: Tensor) -> Tensor:
            return loss(lambda *args: functional_call(self.model, self._views(row), args), *parts)

        found: tuple[Tensor, Tensor] = vmap(grad_and_value(of_one))(self.rows.detach(), *inputs)
        return found

    def _views(self, rows: Tensor) -> dict[str, Tensor]:
        lead = rows.shape[:-1]
        return {
            name: rows[..., columns].reshape(*lead, *self._shapes[name])
            for name, columns in self._layout.layers.items()
        }


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _fault(model: nn.Module, rows: Rows, size: int) -> str | None:
    """Return what cannot be about the workers or the model, or None."""
    if not rows.workers or size:
        return "give either size, 1 or more, or nodes: the workers of each node"
    if rows.workers != list(range(len(rows.workers))):
        return f"nodes={rows.nodes} for {len(rows.workers)} workers; use each of 0, 1, ... once"
    dtypes = {parameter.dtype for parameter in _trained(model).values()}
    if len(dtypes) != 1:
        return f"trainable parameters of the dtypes {dtypes}, expected one; use model.float()"
    return None


def _layers(model: nn.Module) -> dict[str, slice]:
    layers, end = {}, 0
    for name, parameter in _trained(model).items():
        layers[name] = slice(end, end + parameter.numel())
        end += parameter.numel()
    return layers


def _rule(rules: dict[type, Any], exchange: object, rows: Rows, x: Tensor) -> Any:
    """Return what fills a slot; None if it is empty, or of one participant, with whom none is."""
    if exchange is not None and type(exchange) not in rules:
        known = ", ".join(kind.__name__ for kind in rules)
        raise ValueError(f"{exchange}: virtual workers know {known}; use offbeat.testing.simulate")
    rule: Any = exchange and rules[type(exchange)](exchange, rows, x)
    over: Any = getattr(exchange, "over", "local")
    return rule if over == "local" or len(rows.participants(over)) > 1 else None
