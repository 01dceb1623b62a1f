"""Messages of a backward, launched in one order on all ranks and completed together."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from offbeat.comm.group import Group
from offbeat.comm.small_gathers import gather_numbers
from offbeat.exchange import Site
from offbeat.gradients.bucket import agree_on_order, require_first
from offbeat.gradients.feedback import Feedback
from offbeat.gradients.handed import HandedGradients
from offbeat.gradients.message import Message
from offbeat.gradients.units import Scale, Units


@dataclass(eq=False)
class Pipeline:
    """Messages launched during backward, in the order in which their gradients become ready.

    Attributes:
        group: the members that exchange.
        shards: the ranks of the node, if each exchanges its shards of the same layers.
        units: the units of the residuals.
        handed: the gradients of the last backward, and what became of them.
        order: the parameters in the order in which they became ready on rank 0.
        is_measured: whether that was measured; reverse order of registration before.
        is_current: whether the messages are those of this order.
        messages: in the order of their launches, equal on all ranks.
        home: the message of each parameter.
        scales: learning rate and loss scale of each gradient of this backward.
        seen: parameters that are ready in this backward, in order.
        launched: how many messages of this backward were launched.
        waited: seconds that the last backward waited at its end.
    """

    group: Group
    shards: Group | None
    units: Units
    handed: HandedGradients
    order: list[str]
    is_measured: bool = False
    is_current: bool = False
    messages: list[Message] = field(default_factory=list)
    home: dict[str, Message] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    launched: int = 0
    waited: float = 0.0

    @classmethod
    def on(cls, site: Site, units: Units) -> "Pipeline":
        """Start in reverse order of registration, until a backward shows the real order."""
        assert site.group is not None, "a slot alone in its group is disabled"
        handed = HandedGradients(site.registered, site.optimizers)
        return cls(site.group, site.shards, units, handed, list(site.parameters)[::-1])

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
        self.is_current = True
        self.handed.pending.clear()

    def add(self, name: str) -> None:
        """Add the gradient of ``name``, which is ready, to its message."""
        if not self.seen:
            self.scales = self.units.read()
        require_first(self.group, name, self.home[name].missing)
        self.seen.append(name)
        self._add(name, accumulated=True)

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
                self._add(name, accumulated=False)
            self._launch()
        is_finite = self._wait()
        for message in self.messages:
            if is_finite:
                message.commit()
            else:
                message.undo()
        if self.seen:
            self.handed.record()
        else:  # a backward that this rank did not run: the others use what it sent
            self._settle((), ())
        self.launched = 0
        # Here, where all ranks are: in step() another one may be in finish().
        if not self.is_measured:
            self.order = agree_on_order(self.order, self.seen, self.group)
            self.is_measured, self.is_current = True, False
        self.seen.clear()

    def stepped(self) -> None:
        """Keep what used gradients left, and go back to before those that were discarded."""
        self._settle(*self.handed.step())
        for message in self.messages:
            message.stepped()

    def by_name(
        self, kind: Literal["residual", "velocity"], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Copy what messages keep of all parameters; zeros for those that keep nothing.

        A gradient still in ``.grad`` that was not used before ``step()`` counts as discarded.
        """
        found = {}
        unused = self.handed.pending if self.handed.has_stepped else ()
        for name, parameter in parameters.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            found[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if name in self.home:
                feedback: Feedback = getattr(self.home[name], kind)
                kept = (feedback.used if name in unused else feedback.latest).get(name)
                if kept is not None:
                    found[name].copy_(kept)
        return found

    def _wait(self) -> bool:
        """Wait for all messages; return whether all are finite, also those of a node's shards."""
        # All or none: a message may not keep its new residuals while another is undone, nor may
        # the shards of one rank while those of another are, which other groups exchange.
        started = time.perf_counter()
        finite = [message.wait() for message in self.messages]
        self.waited = time.perf_counter() - started
        if self.shards is None:
            return all(finite)
        return all(here for (here,) in gather_numbers([all(finite)], self.shards))

    def _add(self, name: str, *, accumulated: bool) -> None:
        message, continues = self.home[name], False
        if name in self.handed.pending:
            is_used, is_intact = self.handed.pop(name, accumulated=accumulated)
            if is_used:
                message.settle((name,), (), is_last=False)
            elif not is_intact:
                message.settle((), (name,), is_last=False)
            continues = is_intact and not self.handed.has_stepped
        message.add(name, self.scales, continues=continues)

    def _settle(self, used: Collection[str], discarded: Collection[str]) -> None:
        pending = {self.home[name] for name in self.handed.pending}
        of_used, of_discarded = self._by_message(used), self._by_message(discarded)
        for message in self.messages:
            is_last = message not in pending
            names = () if is_last else of_used.get(message, ())
            message.settle(names, of_discarded.get(message, ()), is_last=is_last)

    def _by_message(self, names: Collection[str]) -> dict[Message, list[str]]:
        members: dict[Message, list[str]] = {}
        for name in names:
            members.setdefault(self.home[name], []).append(name)
        return members

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
