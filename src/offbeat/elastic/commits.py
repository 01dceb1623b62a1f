"""The transactions of a rank: when the result of an exchange counts, on all ranks or on none."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.attach.connection import Connection
from offbeat.attach.slots import SlotFiller
from offbeat.elastic.agreement import Agreement, Progress, Stage
from offbeat.elastic.handover import Healed, go_on_with, made_of_gradients
from offbeat.elastic.node import Node
from offbeat.elastic.survivors import Reconnected
from offbeat.exchange import BoundGradients, BoundParameters, Site
from offbeat.exchange.sharding import version
from offbeat.liveness.failure import PeerLost
from offbeat.platform.device import has_streams, wait_for_stream
from offbeat.platform.process_group import has_kernels
from offbeat.transport.group import Group
from offbeat.transport.small_gathers import gather_numbers

ALWAYS = 2**62  # steps


class Commits(ABC):
    """The part of :class:`Generation` that commits exchanges.

    Attributes:
        progress: how far this rank has come.
        committed_in: the last step in which an exchange of all has committed.
        stage: where this rank is in the present step.
        ahead_from: the first step in which ranks do not wait for all at the end of an exchange.
    """

    connection: Connection
    filler: SlotFiller
    node: Node | None
    parameters: BoundParameters

    def __init__(self) -> None:
        self.progress, self.committed_in, self.stage = Progress(0), -1, Stage.COMPUTES
        self.ahead_from, self._versions = 2, 0
        self._reconnected: Reconnected | None = None  # found in a commit, and not yet adopted
        self._healed: Healed | None = None  # on a rank behind, until its step ends
        self._has_result = False  # of the exchange that a loss has ended here

    @property
    @abstractmethod
    def gradients(self) -> BoundGradients:
        """The gradients slot at present."""

    @abstractmethod
    def _reconnect(self, loss: PeerLost) -> Reconnected:
        """Agree with the other survivors, and connect to them."""

    @property
    def has_reconnected(self) -> bool:
        """Whether a loss was found in a commit of the present call, which ends with new links."""
        return self._reconnected is not None

    def _commit(self, steps: int | None) -> None:
        """Commit an exchange that has arrived as a whole on this rank; see :meth:`Site.commit`.

        One of parameters does not wait for the others if their result is kept until the next one
        has arrived here. All have contributed to that one then, so none misses more than the last,
        and gets it after a loss.
        """
        if self._keeps_result():
            return self._go_ahead(steps)
        self._agree()
        self._count(steps)

    def _keeps_result(self) -> bool:
        """Whether the exchange of parameters is the only one of this step, and keeps its result."""
        filler, is_alone = self.filler, self.filler.algorithm.gradients is None
        is_plain = filler.samples is None and not filler.model.is_sharded
        is_step = self.stage == Stage.HAS_STEPPED and self.progress.steps >= self.ahead_from
        slot = self.parameters
        is_kept = self._is_flat and is_alone and is_plain and is_step and slot.result is not None
        return is_kept and _arrives(slot.site)

    @property
    def _is_flat(self) -> bool:
        return self.connection.mates is None and self.node is None

    def made(self, agreed: Agreement) -> Healed:
        """Return what this rank has made of the last result, for those that miss it."""
        if self.filler.algorithm.gradients is not None:
            return made_of_gradients(self.filler, agreed)
        return {"result": self.parameters.result, "common": self.parameters.common()}

    def _arrive(self, steps: int | None) -> None:
        """Commit an exchange of gradients or buffers, and do not wait if ranks can be healed.

        After a loss some may hold its result, and have used it, and some not: no step ends before
        all have contributed to it. Those behind get what another holds: gradients that it has not
        handed out, or parameters and optimizers once it has stepped
        (:mod:`offbeat.elastic.handover`). Between, gradients are the script's, which may clip or
        add to them. So there must be no second exchange or other call between: then this waits.
        """
        if steps is None and self.committed_in == self.progress.steps:
            self.wait_for_calls()
        is_ahead = self.progress.steps >= self.ahead_from and self.gradients.is_settled
        is_alike = is_ahead and self._is_flat and self.filler.heals
        if not (is_alike and _arrives(self.gradients.site)):
            return self._commit(steps)
        self._go_ahead(steps)

    def _go_ahead(self, steps: int | None) -> None:
        """Commit without a wait for the others."""
        self._count(steps)
        self.progress = self.progress._replace(commits=self.progress.commits + 1)

    def _count(self, steps: int | None) -> None:
        used = max(self.progress.used, self.progress.steps + 1 if steps is None else steps)
        self.progress = self.progress._replace(used=used)
        self.committed_in = self.progress.steps

    def wait_from(self, step: int) -> None:
        """Wait at the end of exchanges in this and the following step; all ranks call alike."""
        self.ahead_from = max(self.ahead_from, step + 2)

    def wait_for_calls(self) -> None:
        """Wait in this step, which has more than an exchange; always, if that has ended before.

        In the hands of the script gradients are not handed over to those behind.
        """
        is_between = self.committed_in == self.progress.steps and self.stage != Stage.HAS_STEPPED
        self.wait_from(ALWAYS if is_between else self.progress.steps)

    @property
    def is_behind(self) -> bool:
        """Whether this rank misses a result, until the end of its step."""
        return self._healed is not None

    def miss(self, agreed: Agreement, healed: Healed) -> None:
        """Go on with ``healed``: with gradients at once, with what became of them after the step.

        That rank computes the rest of the step in vain.
        """
        if self.stage != Stage.HAS_GRADIENTS:  # else it misses the buffers only
            self.gradients.missed()
        if "result" in healed:
            self.parameters.go_on_with(healed["result"], healed["common"])
        elif agreed.has_gradients:
            self._has_result = True
            for name, parameter in self.filler.model.trained.items():
                grad = healed["gradients"][name]
                parameter.grad = None if grad is None else grad.to(parameter.device)
        else:
            self._healed = healed
        self.progress = self.progress._replace(commits=agreed.commits, used=agreed.used)
        self.committed_in = self.progress.steps

    @contextmanager
    def at(self, stage: Stage) -> Iterator[None]:
        """Note that this rank is at ``stage`` of a step; it computes before and after."""
        self.stage = stage
        try:
            yield
        finally:
            self.end_step()

    def end_step(self) -> None:
        """Note that this rank computes, with parameters that only optimizers write."""
        self.stage, self._versions = Stage.COMPUTES, self._count_writes()

    def _count_writes(self) -> int:
        return sum(map(version, self.filler.trained)) if self.filler.heals else 0

    def _present_stage(self) -> Stage:
        """Return the stage, where the script may have swapped in an average of weights."""
        is_written = self._count_writes() != self._versions
        return Stage.HAS_WRITTEN if is_written and self.stage == Stage.COMPUTES else self.stage

    def has_result(self) -> bool:
        """Return, once, whether others have handed over the result of the present exchange."""
        had, self._has_result = self._has_result or self.is_behind, False
        return had

    def heal(self) -> None:
        """Take over what others have made of the result that this rank misses, if there is one."""
        if self._healed is not None:
            self.gradients.stepped()  # before parameters are written: a write is a sign of use
            go_on_with(self.filler, self._healed)
            self._healed = None

    def _agree(self) -> None:
        """Return on all survivors, or raise :class:`PeerLost` on all, at the end of an exchange.

        Each rank comes here once it holds the result of an exchange. So where one has returned,
        every survivor holds it too, and returns although this round did not end here: all write,
        or none.
        """
        if (control := self.connection.control) is None:
            return
        try:
            with self.connection.alike():
                self._await_stream(control)
                gather_numbers((), control)
        except PeerLost as loss:
            if not self.filler.is_elastic:
                raise
            self.progress = self.progress._replace(holds=self.progress.commits + 1)
            self._reconnected = self._reconnect(loss)
            agreed = max(each.commits for each in self._reconnected.agreements)
            if agreed == self.progress.commits:
                raise
        self.progress = self.progress._replace(commits=self.progress.commits + 1)

    def _await_stream(self, control: Group) -> None:
        """Block until the exchange has arrived, where its wait returned before: over NCCL."""
        if not has_kernels(control.process_group):
            return
        with control.detector.watching():
            for device in {parameter.device for parameter in self.filler.model.trained.values()}:
                wait_for_stream(device)
        control.detector.raise_agreed_error()


def _arrives(site: Site) -> bool:
    """Whether a message has arrived when a wait for it returns: not from NCCL, on a stream."""
    return not has_streams(site.device)
