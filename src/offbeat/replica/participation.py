"""Who takes part in the training of a replica, and the calls that all of these make together."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from offbeat.attach.connection import Connection
from offbeat.elastic.generation import Generation
from offbeat.elastic.joining import admit
from offbeat.elastic.leaving import let_go
from offbeat.exchange import Algorithm, BoundGradients, BoundParameters, Exchanged
from offbeat.kit.warning import warn
from offbeat.replica.backward.watch import BackwardWatch
from offbeat.replica.consensus import Consensus
from offbeat.transport.world import World

if TYPE_CHECKING:  # importing it takes as long as all of offbeat
    from torch.distributed.checkpoint.stateful import Stateful

Result = TypeVar("Result")


class Participation:
    """The part of a :class:`Replica` that follows changes of the set of ranks."""

    steps: int
    is_new: bool = False  # has joined a run, and made no step since: it has the state of others
    notes: list[str]
    gradients: BoundGradients
    parameters: BoundParameters
    _exchanged: Exchanged
    _members: Generation
    _connection: Connection
    _watch: BackwardWatch
    _consensus: Consensus
    _is_detached: bool
    _followers: list[Callable[[], object]]

    @property
    def world(self) -> World:
        """The layout of the ranks that take part."""
        return self._members.world

    def _require_open(self, also_shown: bool = False) -> None:
        """Raise ValueError where no call is allowed; ``also_shown``: but one on the average."""
        if self._is_detached:
            closed = "after detach(): call replicate() again"
        elif self._consensus.own and not also_shown:
            closed = (
                "inside consensus(): leave the block first, or call show_own() after show_average()"
            )
        elif self._connection.is_inherited:
            closed = "in a forked child of its process: its connections are the parent's"
        else:
            return
        raise ValueError(f"this replica cannot be used {closed}")

    def leave(self) -> None:
        """Announce that this rank leaves an elastic run; the others wait for nothing.

        Where nodes take part it leaves with all ranks of its node, one or more of which call.

        Safe in a signal handler. Train on until :attr:`has_left` is true after a ``step()``: the
        first one in which all exchange, after all have heard of it, about two heartbeats. What
        this rank has not sent yet, residuals and push-sum mass, is then divided between the
        others, and this replica is detached. Their ``lost`` has its entry, with ``"left": 1``.
        Raises ``ValueError`` where a loss ends the run.
        """
        if not self.has_left:
            self.require_may_leave()
            self._members.leave()

    def require_may_leave(self) -> None:
        """Raise ``ValueError`` if :meth:`leave` would."""
        self._require_open(also_shown=True)
        if not self._members.filler.is_elastic:
            raise ValueError(
                f"leave() under {self._members.algorithm} in a run that ends with a loss: pass "
                "elastic=True to replicate()"
            )

    @property
    def has_left(self) -> bool:
        """Whether this rank has left the run by :meth:`leave`."""
        return self._members.has_left

    def register(self, name: str, stateful: "Stateful", *, is_saved: bool = False) -> None:
        """Let ranks that join get the state of ``stateful``, such as a learning rate schedule.

        Call it on all ranks, with the same names. On one that has joined, it loads what
        ``stateful.state_dict()`` has returned on its donor: numbers, text, tensors, and lists,
        tuples and dicts of these; if that raises, the rank that joins does. No communication.

        ``is_saved``: the state, without tensors, is part of :meth:`~Replica.state_dict`, and loaded
        with it.
        """
        if not isinstance(name, str):
            raise ValueError(f"register() got the name {name!r}, expected a text")
        for verb in ("state_dict", "load_state_dict"):
            if not callable(getattr(stateful, verb, None)):
                raise ValueError(f"register({name!r}) got {stateful!r}, which has no {verb}()")
        self._members.register(name, stateful, is_saved)

    def follow(self, adopt: Callable[[], object]) -> None:
        """Call ``adopt`` after each change of the ranks that take part, in the call that finds it.

        For hosts that number the ranks: whoever saves or logs may be lost in any call. Local.
        """
        if not callable(adopt):
            raise ValueError(f"follow() got {adopt!r}, expected a function without arguments")
        self._followers.append(adopt)

    def gather(self, text: str) -> list[str]:
        """Return what every rank passes, by rank; all ranks call, also inside ``consensus()``.

        All get the same, in an elastic run also of a rank that is lost at the end of the call.
        """
        self._require_open(also_shown=True)
        return self._together("gather", self._members.gather(text))

    def _together(self, verb: str | None, call: Callable[[], Result]) -> Result:
        self._exchanged.reshard()
        return self._members.together(verb, call, lambda: self.steps, self._adopt)

    def _transact(self, call: Callable[[], Result]) -> Result:
        """Make a call that ranks of other nodes may not make, those of a sharded node together."""

        def alike() -> Result:
            # After it they may wait for each other outside of offbeat.
            with self._connection.alike():
                return call()

        return self._together(None, alike)

    def _admit(self) -> None:
        """Let a rank in that all have agreed on; before, go on without one that was lost."""

        def let_in() -> None:
            if texts := admit(self._members, self._exchanged, self.steps):
                self._adopt(texts)

        if self._members.admission.begin_step():
            self._together(None, let_in)

    def _let_go(self) -> None:
        """Let a rank or node go, if one waits to leave and all have agreed on this step."""

        def part() -> bool:
            if (texts := let_go(self._members, self.steps)) and not self.has_left:
                self._adopt(texts)
            return self.has_left

        if self._members.lets_go:
            self._members.has_left = self._together("leave", part)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm at present."""
        return self._members.algorithm

    @property
    def _named_algorithm(self) -> dict[str, str]:
        return {"algorithm": str(self.algorithm), "exchanges": repr(self.algorithm)}

    def _take_slots(self) -> None:
        self.gradients, self.parameters = self._members.gradients, self._members.parameters
        self._watch.exchange.follow()

    def _adopt(self, texts: Sequence[str]) -> None:
        """Go on with the ranks that take part now; ``texts`` say who was lost or has joined."""
        self._connection, was_empty = self._members.connection, self._watch.slot.is_empty
        self._take_slots()
        if was_empty and not self._watch.slot.is_empty:  # others have come to a rank without mates
            self._watch.hook()
        self._watch.is_first = False  # others may be past their first step
        for follow in self._followers:
            follow()
        for text in texts:
            warn(text)

    def _note(self, note: str | None) -> None:
        if note is not None and note not in self.notes:
            self.notes.append(note)
            warn(f"rank {self.world.rank}: {note}")
