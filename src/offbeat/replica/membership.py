"""Who takes part in the training of one replica: losses that it survives, and ranks that join."""

from collections.abc import Sequence
from typing import final

from torch import nn

from offbeat.comm.failure import PeerLost
from offbeat.comm.group import Group
from offbeat.exchange import ElasticExchange
from offbeat.replica import survivors
from offbeat.replica.admission import Admission, let_in, sponsor_of
from offbeat.replica.connection import Connection
from offbeat.replica.handover import Place, give, take
from offbeat.replica.slots import SlotFiller
from offbeat.replica.survivors import Agreement, Reconnected


@final
class Membership:
    """The connection to the other ranks, with the slots over it, and its changes.

    Attributes:
        connection: the connection at present.
        gradients: the gradients slot.
        parameters: the parameters slot at present.
        steps: the number of steps before this rank came.
        lost: the ranks that were lost, each with the step from which the others exchanged again.
        joined: the ranks that have joined, each with its first step.
        exchanges_from: the first step after a loss at which all survivors exchange.
    """

    def __init__(self, connection: Connection, filler: SlotFiller) -> None:
        """Fill the slots; all ranks call."""
        self.connection, self._filler = connection, filler
        self.algorithm, self.notes = filler.algorithm, filler.notes
        self.gradients = filler.gradients(connection.links, connection.control)
        self.parameters = filler.parameters(connection.links, connection.control)
        self.steps = 0
        self.lost: list[dict[str, int]] = []
        self.joined: list[dict[str, int]] = []
        self.exchanges_from = 0
        self._admission = Admission()

    def continue_without(self, steps: int, loss: PeerLost) -> list[str]:
        """Connect to the other survivors after ``steps``, or raise ``loss``.

        They start from the models as they are. Returns lines for the log.
        """
        exchange = self.algorithm.parameters
        if exchange is None or exchange.on_failure == "raise":
            raise loss
        return self._adopt(survivors.reconnect(self.connection, self._filler, steps, loss))

    def admit(self, model: nn.Module, steps: int) -> list[str]:
        """Let a rank join if all have agreed on that for this step; return lines for the log.

        The members keep numerators and weights, with what is in flight merged. Only the sponsor
        is late for the exchange that follows, by one model.
        """
        links, exchange = self.connection.links, self.algorithm.parameters
        if links is None or not links.run or not isinstance(exchange, ElasticExchange):
            return []
        wish = self._admission.due(links, exchange, steps, self.exchanges_from)
        if wish is None:
            return []
        with links.heartbeat.verb("step"):
            weight = self.parameters.drain()
        between = let_in(links, wish)
        if between is None:
            self._admission.is_refused = True
            return [f"rank {links.world.rank}: rank {wish.rank} was lost while it joined"]
        members, earlier = links.world.ranks, self.connection
        current = Connection(between.world, between, None)
        try:
            found = survivors.connect_over(current, earlier, self._filler, steps, [])
        finally:
            links.close()
        texts = self._adopt(found)
        if not found.agreements:
            texts += self._share(model, wish.rank, members, steps, weight)
        return texts

    def take(self, model: nn.Module) -> None:
        """Take the model, half of the weight and the place of the sponsor: this rank joins."""
        world = self.connection.world
        sponsor = sponsor_of([rank for rank in world.ranks if rank != world.rank], world.rank)
        place = take(model, sponsor, self._control)
        self.parameters.enter(place.weight)
        self.connection.resume(place.phase)
        self.steps = place.steps
        self.joined.append({"rank": world.rank, "step": place.steps})

    @property
    def _control(self) -> Group:
        assert self.connection.control is not None, "a rank joins others"
        return self.connection.control

    def _share(
        self, model: nn.Module, newcomer: int, members: Sequence[int], steps: int, weight: float
    ) -> list[str]:
        """Go on with the weight of this rank; the sponsor gives half of it."""
        world, phase = self.connection.world, self._control.detector.phase
        self.joined.append({"rank": newcomer, "step": steps})
        is_sponsor = sponsor_of(members, newcomer) == world.rank
        self.parameters.enter(weight / 2 if is_sponsor else weight)
        if is_sponsor:
            give(model, Place(steps, weight / 2, phase), newcomer, self._control)
        return [
            f"rank {world.rank}: rank {newcomer} has joined; {list(world.ranks)} train on, with "
            f"exchanges between all from step {steps}"
        ]

    def _adopt(self, found: Reconnected) -> list[str]:
        self.connection, self.parameters = found.connection, found.parameters
        return [self._note(agreed) for agreed in found.agreements]

    def _note(self, agreed: Agreement) -> str:
        self.exchanges_from = agreed.step
        self.lost += [{"rank": rank, "step": agreed.step} for rank in agreed.lost]
        return agreed.text(self.connection.world.rank)
