"""What becomes of the gradients that an exchange has put into ``.grad``."""

from collections.abc import Collection, Mapping

from torch import Tensor
from torch.optim import Optimizer

from offbeat.exchange.sharding import version

# A gradient in .grad, and the versions of it and of its parameter at that time. A plain tuple: one
# is made for each parameter in each backward.
Handed = tuple[Tensor, int, int]


class HandedGradients:
    """The gradients that the last exchange put into ``.grad`` and nobody has used or discarded.

    A gradient is used when an optimizer that holds its parameter steps. If no known optimizer holds
    the parameter, any change of it in place counts as use. A gradient is discarded when ``.grad``
    was cleared, replaced or changed in place without use. While no use was ever seen, ``step()``
    says that all are used.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizers: Collection[Optimizer]) -> None:
        self.parameters = parameters
        self.pending: dict[str, Handed] = {}  # of which is not known yet what becomes of them
        self.has_stepped = False  # whether step() was called since they were handed out
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._optimized: set[str] = set()  # since the gradients were handed out
        self._held_by_known: set[str] = set()
        for optimizer in optimizers:
            self._held_by_known |= self._held_by(optimizer)
        self._use_was_seen = bool(optimizers)

    def record(self) -> None:
        """Note what the exchange has put into ``.grad``."""
        self.has_stepped = False
        self._optimized.clear()
        self.pending = {
            name: (grad, version(grad), version(parameter))
            for name, parameter in self.parameters.items()
            if (grad := parameter.grad) is not None
        }

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has used the gradients of its parameters."""
        # Hooks of other replicas in this process run in other threads.
        if names := self._held_by(optimizer):
            self._optimized |= names
            self._held_by_known |= names

    def _held_by(self, optimizer: Optimizer) -> set[str]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {self._names[i] for i in held & self._names.keys()}

    def accumulated(self, name: str) -> None:
        """Note that a backward without an exchange has added to ``.grad``."""
        if name in self.pending:
            grad, count, parameter_count = self.pending[name]
            self.pending[name] = (grad, count + 1, parameter_count)

    def step(self) -> tuple[set[str], set[str]]:
        """Return which gradients were used and which were discarded before this ``step()``."""
        used = {name for name, handed in self.pending.items() if self._is_used(name, handed)}
        self.has_stepped = True
        self._use_was_seen |= bool(used)
        if not self._use_was_seen:
            used = set(self.pending)  # written through .data, or used for something else
        rest = {name: handed for name, handed in self.pending.items() if name not in used}
        # Those still in .grad without a sign of use remain pending: a GAN's script clears the
        # gradients of its generator's backward in the discriminator when the next batch begins.
        self.pending = {
            name: handed for name, handed in rest.items() if self._is_intact(name, handed, 0)
        }
        return used, rest.keys() - self.pending.keys()

    def pop(self, name: str, *, accumulated: bool) -> tuple[bool, bool]:
        """Return whether a gradient to be exchanged again was used, and is still in ``.grad``.

        ``accumulated`` is whether this backward has added to it.
        """
        handed = self.pending.pop(name)
        is_used = self._is_used(name, handed)
        self._use_was_seen |= is_used
        return is_used, self._is_intact(name, handed, accumulated)

    def _is_used(self, name: str, handed: Handed) -> bool:
        # Other writes count only of a parameter that no known optimizer holds: averages of weights
        # are swapped in for an evaluation, and our own exchanges write after step().
        if self.has_stepped or name in self._held_by_known:
            return name in self._optimized
        _, _, count = handed
        return name in self._optimized or version(self.parameters[name]) != count

    def _is_intact(self, name: str, handed: Handed, additions: int) -> bool:
        grad, count, _ = handed
        return self.parameters[name].grad is grad and version(grad) == count + additions
