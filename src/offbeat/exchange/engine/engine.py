"""The engine of gradient exchanges: one order of messages, completed at the end of backward."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from offbeat.exchange import BoundGradients, Saved, Site, Variable, plain
from offbeat.exchange.engine.dot_grad import place, stored
from offbeat.exchange.engine.message import Message
from offbeat.exchange.weights import weigh_gradients
from offbeat.transport.collectives import broadcast
from offbeat.transport.group import Group, message_device

Kind = TypeVar("Kind", bound=Message)


@dataclass(eq=False)
class Engine(BoundGradients, Generic[Kind]):
    """Launches messages during backward, as their gradients become ready, and completes them.

    Subclasses say what a message is and, where that differs, when its gradients are read
    (:meth:`add`) and written (:meth:`collect`).
    """

    site: Site
    settings: Any
    order: list[str] = field(init=False)  # in which parameters became ready on rank 0
    is_measured: bool = False
    is_current: bool = False  # whether the messages are those that the next step needs
    messages: list[Kind] = field(default_factory=list)  # in the order of launches, equal on all
    home: dict[str, Kind] = field(default_factory=dict)  # the message of each parameter
    seen: dict[str, None] = field(default_factory=dict)  # what is ready in this backward, in order
    launched: int = 0  # messages of this backward

    def __post_init__(self) -> None:
        """Start in reverse order of registration, until a backward shows the real order."""
        self.order = list(self.site.parameters)[::-1]

    @property
    def group(self) -> Group:
        """The members that exchange."""
        assert self.site.group is not None, "a slot alone in its group is disabled"
        return self.site.group

    @property
    def is_settled(self) -> bool:
        """Whether the order is measured; the exchange that does so changes it on all ranks."""
        return self.is_measured

    @abstractmethod
    def new_messages(self) -> Sequence[Kind]:
        """Return the messages of all parameters, for the present order."""

    def state(self) -> Iterator[Variable]:
        """Yield the order of readiness: it decides in which order floats are added."""
        yield plain("shared", self, "order", lambda order: order_fault(order, self.site.parameters))
        yield plain("shared", self, "is_measured", name="measured")

    def load(self, saved: Saved) -> None:
        """Restore what :meth:`save` returned, and build the messages that it fixes."""
        super().load(saved)
        self.build()

    def begin_with(self, common: Saved) -> None:
        """Take over what is shared, and build the messages that it fixes."""
        super().begin_with(common)
        self.build()

    def build(self) -> None:
        """Build the messages; the one whose last gradient is ready first is launched first."""
        turn = {name: number for number, name in enumerate(self.order)}
        messages = self.new_messages()
        self.messages = sorted(messages, key=lambda message: max(turn[n] for n in message.names))
        self.home = {name: message for message in self.messages for name in message.names}
        self.is_current = True

    def ready(self, name: str) -> None:
        """Add a gradient to its message; launch the messages that miss none, in order."""
        if not self.seen:
            self.begin()
        message = self.home[name]
        if name not in message.missing:  # the first one may have been sent
            raise self.group.detector.report_error(_got_twice(name))
        self.seen[name] = None
        self.place(name)
        self.add(name)
        if message.missing:
            return
        while not self.complete() and not self.messages[self.launched].missing:
            self.launch()

    def begin(self) -> None:
        """Begin a backward: agree on the weights of the members, in a run that has them."""
        weigh_gradients(self.site, self.group)

    def place(self, name: str) -> None:
        """Place the gradient of a sharded parameter as the parameter."""
        if self.site.shards is not None:
            place(self.site.registered[name])

    def add(self, name: str) -> None:
        """Add a gradient to its message; one without residuals reads all at its launch."""
        self.home[name].missing.discard(name)

    def launch(self) -> None:
        """Launch the next message."""
        # In one order on every rank, whatever the order of readiness: collectives pair up by the
        # order of their launches, so a rank that let message 2 overtake message 1 would mix them.
        self.messages[self.launched].launch()
        self.launched += 1

    def complete(self) -> bool:
        """Return whether every message was launched."""
        return self.launched == len(self.messages)

    def finish(self) -> None:
        """Launch the messages that miss gradients too, wait, and write the results."""
        if not self.seen:
            self.begin()
        while not self.complete():
            missing = self.messages[self.launched].missing
            for name in [name for name in self.order if name in missing]:
                self.place(name)
                self.add(name)
            self.launch()
        # Here, where all ranks are: in step() another one may be in finish(). And before the
        # commit, after which no rank waits for another.
        measured = None
        if not self.is_measured:
            measured = _agree_on_order(self.order, self.seen, self.group)
        self.collect()
        for message in self.messages:
            message.missing.update(message.names)
        self.launched = 0
        if measured is not None:
            self.is_current &= measured == self.order  # a compressor may remember something
            self.order, self.is_measured = measured, True
        self.seen.clear()

    def collect(self) -> None:
        """Wait for the messages, and put what each brings into ``.grad``."""
        for message in self.messages:
            message.wait()
        self.site.commit()
        for message in self.messages:
            message.commit()
        self.copy_replicated()

    def copy_replicated(self) -> None:
        """Make the gradients of a part that several ranks of a node hold equal, bit for bit."""
        site = self.site
        if site.replicated is not None:
            grads = {name: stored(parameter) for name, parameter in site.registered.items()}
            site.replicated.copy({name: g for name, g in grads.items() if g is not None})

    def stepped(self) -> None:
        """Begin a step; build new messages if they are others now."""
        # Not in finish: a second backward of the same step must find what the first handed out.
        for message in self.messages:
            message.stepped()
        if not self.is_current:
            self.build()


def order_fault(order: Sequence[object], parameters: Collection[str]) -> str | None:
    """Return what makes a saved order useless for these parameters, or None.

    >>> order_fault(["b", "a"], ["a", "b"])
    >>> order_fault(["b", "b"], ["a", "b"])
    "the order ['b', 'b'] does not name each of the 2 parameters once"
    """
    names = [name for name in order if isinstance(name, str)]
    if len(names) == len(order) and sorted(names) == sorted(parameters):
        return None
    return (
        f"the order {ascii(order)[:60]} does not name each of the {len(parameters)} parameters once"
    )


def _got_twice(name: str) -> ValueError:
    return ValueError(
        f"parameter {name!r} got a gradient twice in one backward: it is used more than once, at "
        "least once in a block checkpointed with use_reentrant=True; use use_reentrant=False"
    )


def _agree_on_order(order: Sequence[str], seen: Collection[str], group: Group) -> list[str]:
    """Return the order in which gradients became ready on rank 0, then the rest of ``order``."""
    names = sorted(order)
    mine = [*dict.fromkeys([*seen, *order])]
    indices = torch.tensor([names.index(name) for name in mine], device=message_device(group))
    broadcast(indices, 0, group).wait()
    return [names[i] for i in indices.tolist()]
