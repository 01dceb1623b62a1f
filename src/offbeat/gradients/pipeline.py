"""Messages of a backward, launched in one order on all ranks and completed together."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from offbeat.comm.group import Group
from offbeat.exchange import Site
from offbeat.gradients.bucket import agree_on_order, require_first
from offbeat.gradients.message import Message
from offbeat.gradients.units import Scale, Units


@dataclass(eq=False)
class Pipeline:
    """Messages launched during backward, in the order in which their gradients become ready.

    Attributes:
        group: the members that exchange.
        units: the units of the residuals.
        order: the parameters in the order in which they became ready on rank 0.
        is_measured: whether that was measured; reverse order of registration before.
        messages: in the order of their launches, equal on all ranks.
        home: the message of each parameter.
        scales: learning rate and loss scale of each gradient of this backward.
        seen: parameters that are ready in this backward, in order.
        first_seen: the same of the first backward.
        launched: how many messages of this backward were launched.
        waited: seconds that the last backward waited at its end.
    """

    group: Group
    units: Units
    order: list[str]
    is_measured: bool = False
    messages: list[Message] = field(default_factory=list)
    home: dict[str, Message] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    first_seen: list[str] | None = None
    launched: int = 0
    waited: float = 0.0

    @classmethod
    def on(cls, site: Site, units: Units) -> "Pipeline":
        """Start in reverse order of registration, until a backward shows the real order."""
        assert site.group is not None, "a slot alone in its group is disabled"
        return cls(site.group, units, list(site.parameters)[::-1])

    def replace(
        self,
        messages: Sequence[Message],
        residual: Mapping[str, Tensor],
        velocity: Mapping[str, Tensor],
    ) -> None:
        """Exchange through other ``messages``, which start from these residuals."""
        self.messages = list(messages)
        self.home = {name: message for message in messages for name in message.missing}
        for name, message in self.home.items():
            message.remember(name, residual.get(name), velocity.get(name))

    def resume(self, order: Sequence[str], is_measured: bool) -> None:
        """Continue with a saved order of readiness; :meth:`replace` the messages then."""
        self.order, self.is_measured = list(order), bool(is_measured)
        if not is_measured:
            self.first_seen = None

    def add(self, name: str) -> None:
        """Add the gradient of ``name``, which is ready, to its message."""
        if not self.seen:
            self.scales = self.units.read()
        message = self.home[name]
        require_first(self.group, name, message.missing)
        self.seen.append(name)
        message.add(name, self.scales, accumulated=True)

    def launch_next(self) -> Message | None:
        """Launch the next message if none of its gradients is missing; return it, or None."""
        if self.is_launched or self.messages[self.launched].missing:
            return None
        return self._launch()

    @property
    def is_launched(self) -> bool:
        """Whether all messages of this backward were launched."""
        return self.launched == len(self.messages)

    def finish(self) -> None:
        """Launch the messages that still miss gradients, wait for all, and hand out the results."""
        if not self.seen:
            self.scales = self.units.read()
        while not self.is_launched:
            message = self.messages[self.launched]
            for name in [name for name in self.order if name in message.missing]:
                message.add(name, self.scales, accumulated=False)
            self._launch()
        # All or none: a message may not keep its new residuals while another is undone.
        started = time.perf_counter()
        finite = [message.wait() for message in self.messages]
        self.waited = time.perf_counter() - started
        for message in self.messages:
            if all(finite):
                message.commit()
            else:
                message.undo()
        if self.first_seen is None:
            self.first_seen = list(self.seen)
        self.launched = 0
        self.seen.clear()

    def stepped(self) -> None:
        """Note that the optimizer has used the gradients."""
        for message in self.messages:
            message.stepped()

    def measure_order(self) -> None:
        """Take the order of readiness in the first backward of rank 0; all members call."""
        self.order = agree_on_order(self.order, self.first_seen or [], self.group)
        self.is_measured = True

    def by_name(
        self, kind: Literal["residual", "velocity"], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Copy what messages keep of all parameters; zeros for those that keep nothing."""
        found = {}
        for name, parameter in parameters.items():
            kept = getattr(self.home[name], kind).get(name) if name in self.home else None
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            found[name] = zeros if kept is None else zeros.copy_(kept)
        return found

    def _launch(self) -> Message:
        # In one order on every rank, whatever the order of readiness: collectives pair up by the
        # order of their launches, so a rank that let message 2 overtake message 1 would mix them.
        message = self.messages[self.launched]
        message.launch(self.scales)
        self.launched += 1
        return message


def by_readiness(messages: Sequence[Message], order: Sequence[str]) -> list[Message]:
    """Sort messages by their last gradient in ``order``: the first to be complete is first."""
    place = {name: index for index, name in enumerate(order)}
    return sorted(messages, key=lambda message: max(place[name] for name in message.missing))
