"""Who takes part in the training of one replica: losses that it survives, and ranks that join."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, final

from offbeat.attach.connection import Connection
from offbeat.attach.slots import SlotFiller
from offbeat.elastic import survivors
from offbeat.elastic.admission import Admission
from offbeat.elastic.agreement import Agreement, Progress
from offbeat.elastic.commits import Commits
from offbeat.elastic.node import Node
from offbeat.elastic.survivors import Reconnected
from offbeat.exchange import Algorithm, BoundGradients, BoundParameters, IdleParameters
from offbeat.exchange.buffers import BufferBroadcast
from offbeat.exchange.sharding import local
from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.transport.group import Group
from offbeat.transport.interface import Transport
from offbeat.transport.links import Links
from offbeat.transport.meter import Meter
from offbeat.transport.small_gathers import gather_bytes
from offbeat.transport.world import World

if TYPE_CHECKING:  # importing it takes as long as all of offbeat
    from torch.distributed.checkpoint.stateful import Stateful

Result = TypeVar("Result")


@final
class Generation(Commits):
    """The connection to the other ranks, with the slots over it, and its changes.

    Where whole nodes come and go, ``node`` connects the ranks of this one, ``connection`` joins the
    nodes, each as one rank, and all but the first rank of a node are alone in theirs. Of a sharded
    model ``connection`` joins all ranks, and its ``mates`` those of this node.

    Attributes:
        connection: the connection at present.
        parameters: the parameters slot at present.
        steps: the number of steps before this rank came.
        lost: the ranks that were lost, each with the step from which the others exchanged again,
            and with "used", the number of its steps that an exchange has committed; those that have
            left also with "left", and their last step; those of nodes also with their "node".
        joined: the ranks that have joined, each with its first step.
        switches: the algorithms since the first, each with its first step.
        planned: the algorithm that was given last, with all phases of its schedule, as text.
        exchanges_from: the first step after a loss at which all survivors exchange.
        has_left: whether this rank has left.
    """

    def __init__(
        self,
        connection: Connection,
        filler: SlotFiller,
        node: Node | None = None,
        joins: bool = False,
    ) -> None:
        """Fill the parameters slot; all ranks call. ``joins``: this rank joins others."""
        if filler.is_elastic:
            filler = replace(filler, transaction=self._commit, arrival=self._arrive)
        self.connection, self.filler, self.node = connection, filler, node
        super().__init__()
        self._gradients: BoundGradients | None = None
        self._following: SlotFiller | None = None  # of a switch that has not been committed
        self.notes, self.parameters = filler.notes, self.filled_parameters(filler)
        self.steps = 0
        self.lost: list[dict[str, int]] = []
        self.joined: list[dict[str, int]] = []
        self.switches: list[dict[str, Any]] = []
        self.exchanges_from, self.has_left, self.planned = 0, False, repr(filler.algorithm)
        self._alone_from: int | None = None  # the step which a loss has left without an exchange
        # Not before it knows in which step the others are.
        listens = filler.is_elastic and not joins
        self.admission = Admission(connection.links if listens else None)

    @property
    def gradients(self) -> BoundGradients:
        """The gradients slot, filled when it is first asked for; all ranks ask together."""
        if self._gradients is None:
            self._gradients = self.filled_gradients(self.filler)
        return self._gradients

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm at present."""
        return self.filler.algorithm

    @property
    def buffers(self) -> BufferBroadcast | None:
        """The broadcast of the gradients slot, where it makes one."""
        kinds = self.filler.model.kinds
        return BufferBroadcast.beside(self.gradients, self.algorithm.gradients, kinds)

    @property
    def world(self) -> World:
        """The layout of the ranks that take part."""
        return self.connection.world if self.node is None else self.node.world

    @property
    def meter(self) -> Meter:
        """The counters of all that this rank sends."""
        return self.connection.meter if self.node is None else self.node.meter

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The heartbeat inside the node where it has one, otherwise that of the connection."""
        near = self.node.links if self.node is not None else None
        return near.heartbeat if near is not None else self.connection.heartbeat

    def stats(self) -> dict[str, Any]:
        """Return who takes part, who has come and gone, and notes."""
        return {
            "algorithm": str(self.algorithm),
            "rank": self.world.rank,
            "size": self.world.size,
            "notes": list(self.notes),
            "lost": [dict(loss) for loss in self.lost],
            "joined": [dict(join) for join in self.joined],
            "switches": [dict(switch) for switch in self.switches],
        }

    def together(
        self,
        verb: str | None,
        call: Callable[[], Result],
        steps: Callable[[], int],
        adopt: Callable[[list[str]], None],
    ) -> Result:
        """Make a call that waits for others; after a loss that the run survives, repeat it.

        ``verb`` is None for one that not all ranks make: the others notice a loss in their own. The
        verb "leave" is one of each node. ``adopt`` takes over the connection after a change of
        those that take part.
        """
        common = None if verb == "leave" else verb

        def survive() -> Result:
            while True:
                self.progress = self._progress(steps())
                if common not in (None, "step"):
                    self.wait_for_calls()
                try:
                    with self.connection.calling(common), self.connection.alike(common is not None):
                        result = call()
                        if common not in (None, "step", "switching") and self.filler.is_elastic:
                            self._agree()  # or some would repeat what is over for the others
                except PeerLost as loss:
                    if not self.filler.is_elastic:
                        raise
                    if verb == "step" and self._may_go_on():
                        continue
                    adopt(self.adopt(self._reconnected or self._reconnect(loss)))
                    continue
                if self._reconnected is not None:
                    adopt(self.adopt(self._reconnected))
                return result

        if self.node is None:
            return survive()
        with self.node.resigning(self._resign):
            if verb is None:
                return self.node.alone(survive, lambda: self.connection.heartbeat)
            model, known = self.filler.model, len(self.lost) + len(self.joined)
            parameters = [local(p) for p in model.trained.values()]
            changes, lets_go = (self.lost, self.joined), lambda: self.admission.lets_go
            told = changes, parameters, lambda: model.buffers, lets_go
            with self.node.calling(verb):
                result = self.node.together(verb, survive, *told)
            self.admission.wants_to_leave |= self.node.is_leaving
            if not self.node.is_first and len(self.lost) + len(self.joined) > known:
                adopt([])  # the first one has, and has warned
            return result

    def leave(self) -> None:
        """Let this rank leave, or its node, as soon as all have agreed on the step."""
        if self.node is None:
            self.admission.wants_to_leave = True
        else:
            self.node.wants_to_leave = True

    @property
    def lets_go(self) -> bool:
        """Whether a rank or node waits to leave; equal on all ranks of a node."""
        return self.admission.lets_go if self.node is None else self.node.lets_go

    def _may_go_on(self) -> bool:
        """Return, once a step, whether this rank ends it without an exchange after a loss.

        Where exchanges start anew, which nobody makes again. Then all agree at the beginning of
        their next ``step()``: a rank that waits here meanwhile for those that are a step ahead, and
        compute, would have them wait for its next step in turn.
        """
        if not self.starts_anew or self._alone_from is not None:
            return False
        self._alone_from, self.exchanges_from = self.progress.steps, self.progress.steps + 1
        return True

    def settle(self, steps: int) -> None:
        """Note that what all ranks did in the first ``steps`` steps is in what each holds."""
        self.progress = self.progress._replace(used=steps)

    def register(self, name: str, stateful: "Stateful", is_saved: bool) -> None:
        """Hand the state of ``stateful`` over to ranks that join; load it if this one has."""
        self.filler.registered[name] = stateful
        if is_saved:
            self.filler.saved[name] = stateful
        if name in self.filler.received:
            stateful.load_state_dict(self.filler.received.pop(name))

    def report_error(self, error: Exception) -> Exception:
        """Make ``error`` the agreed error of all ranks, and return the agreed error to raise."""
        found = self.connection.report_error(error)
        return found if self.node is None else self.node.report_error(found)

    def gather(self, text: str) -> Callable[[], list[str]]:
        """Return a call for :meth:`together` that returns what every rank passes."""
        inside = [text]
        if self.node is not None:
            with self.node.resigning(self._resign):
                inside = self.node.gather(text)

        def between() -> list[str]:
            nodes = gather_bytes(json.dumps(inside).encode(), self.connection.control)
            return [text for node in nodes for text in json.loads(node)]

        return between

    def close(self) -> None:
        """End heartbeats, threads and groups; and the run, unless a rank of this node is lost."""
        mates = self.node or self.connection.mates
        if mates is not None and mates.is_lost:
            self._resign()
        if self._gradients is not None:
            self._gradients.detach()  # first: the model loses its hooks even if a close raises
        self.connection.close(ends_run=True)
        self.admission.close()
        if mates is not None:
            mates.close()

    def filled_parameters(
        self, filler: SlotFiller, over: Callable[[Links], Transport] = lambda links: links
    ) -> BoundParameters:
        """Return the parameters slot over the present links; all ranks call."""
        if self.node is not None and not self.node.is_first:
            return IdleParameters(None)
        links, control = self.connection.links, self.connection.control
        return filler.parameters(links and over(links), control)

    def filled_gradients(
        self, filler: SlotFiller, over: Callable[[Links], Transport] = lambda links: links
    ) -> BoundGradients:
        """Return the gradients slot over the present links; all ranks call."""
        near = self.connection if self.node is None else self.node
        return filler.gradients(near.links and over(near.links), near.control)

    @property
    def starts_anew(self) -> bool:
        """Whether exchanges commit nothing, and survivors start anew from their models."""
        far = self.algorithm.parameters
        return far is not None and far.on_loss == "anew"

    def _progress(self, steps: int) -> Progress:
        """Return how far this rank is."""
        used = self.progress.used
        if self.starts_anew:
            used = steps if self._alone_from is None else self._alone_from
        return Progress(steps, self.progress.commits, used, 0, int(self._present_stage()))

    def agree_on(self, filler: SlotFiller) -> None:
        """Return if all ranks have come here, to go on with ``filler``: on all, or on none."""
        self._following = filler
        try:
            self._agree()
        finally:
            self._following = None

    def take_over(self, filler: SlotFiller, slots: tuple[BoundParameters, BoundGradients]) -> None:
        """Go on with these slots, which ``filler`` has filled."""
        self.filler, (self.parameters, self._gradients) = filler, slots
        self.wait_from(self.progress.steps)

    def _reconnect(self, loss: PeerLost) -> Reconnected:
        given = self.connection, self.filler, self.progress, loss, self.made, self._following
        return survivors.reconnect(*given)

    @property
    def slots(self) -> list[BoundParameters | BoundGradients]:
        """The slots that ranks fill together with those who join."""
        return [self.parameters, *([self.gradients] if self.filler.exchanges_again else [])]

    @property
    def unit(self) -> str:
        """What takes part: "rank" or "node"."""
        return "rank" if self.node is None else "node"

    def _resign(self) -> None:
        """Leave the other nodes to themselves: this one can no longer take part."""
        if self.connection.links is not None:
            survivors.resign(self.connection.links)

    def entries(self, number: int, **entry: int) -> list[dict[str, int]]:
        """Return the entries of ``lost`` or ``joined`` for a rank, or for each one of a node."""
        if self.node is None:
            return [{"rank": number, **entry}]
        ranks = self.node.everyone.nodes[number]
        return [{"node": number, "rank": rank, **entry} for rank in ranks]

    @property
    def control(self) -> Group:
        """The group of those that take part; only where there are several."""
        assert self.connection.control is not None, "a rank joins others"
        return self.connection.control

    def adopt(self, found: Reconnected) -> list[str]:
        """Go on over what was found after a loss or a join; return lines for the log."""
        if (before := self.connection.heartbeat) is not None:
            # It may have ended the call meanwhile. Exchanges are made again by all, from here on.
            found.connection.resume(before.phase._replace(exchanges=0))
        self.wait_from(max([self.progress.steps, *(each.step for each in found.agreements)]))
        if found.healed is not None:
            self.miss(found.agreements[-1], found.healed)
        if self.filler.is_elastic:
            found.parameters.succeed(self.parameters)
            if found.gradients is not None and self._gradients is not None:
                found.gradients.succeed(self._gradients)
                self._gradients.detach()
                self._gradients = found.gradients
        self.connection, self.parameters = found.connection, found.parameters
        self._alone_from = None
        self.admission.close()
        self.admission, self._reconnected = Admission(found.connection.links, self.admission), None
        if self.node is not None:
            self.node.go_on(self.connection.world.ranks, self.connection.world.rank)
        return [self._note(agreed, found.agreements[-1].used) for agreed in found.agreements]

    def _note(self, agreed: Agreement, used: int) -> str:
        self.exchanges_from = agreed.step
        for number in agreed.lost:
            self.lost += self.entries(number, step=agreed.step, used=used)
        unit, rank = self.unit, self.connection.world.rank
        return (
            f"{unit} {rank}: {unit}s {list(agreed.lost)} are lost; {list(agreed.living)} train on, "
            f"with exchanges from step {agreed.step}. See the logs of the lost {unit}s"
        )
