"""DASO's exchange between nodes: stale averages, and blocking ones before and after."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from offbeat.exchange import (
    BoundParameters,
    ParameterExchange,
    Saved,
    Site,
    Variable,
    count_fault,
    plain,
)
from offbeat.exchange.guard import Guard, Nonfinite
from offbeat.exchange.interface import OnLoss
from offbeat.exchange.weights import Window
from offbeat.functional import progress
from offbeat.kit.warning import warn
from offbeat.methods.stale_average.rotation import Rotation
from offbeat.settings import check_settings
from offbeat.topology.schedule import Cadence, Cycle
from offbeat.transport.small_gathers import gather_numbers


@final
@dataclass(frozen=True, kw_only=True)
class StaleAverage(ParameterExchange):
    r"""Sum the models of all nodes while training continues, and merge the sum W steps later.

    .. math::
        x^l_{t+W} \leftarrow \frac{2W x^l_{t+W} + \sum_{i=1}^{P} x^i_t}{2W + P}
        \quad \text{(cycling)}, \qquad
        x^l \leftarrow r + \frac{1}{P} \sum_{i=1}^{P} \mathrm{cast}(x^i - r + e^i)
        \quad \text{(warm-up, cool-down)}

    P is the number of nodes, whatever their size. One group of ranks with equal local rank
    exchanges at a time, the next one after each exchange; its member in every node then broadcasts
    the result there. There are as many groups as the smallest node has ranks. :class:`Cycle`
    decides when nodes exchange.

    The first merge counts the sum P times, which lacks the progress of W steps. Of updates that are
    equal on all nodes a share of 1 - W P/((2W + P) B) is left: 0.875 at B = 8, W = 2 and P = 4, and
    0.2 at B = W = 1 and P = 8. ``merge="exact"`` forgets nothing:

    .. math:: x^l_{t+W} \leftarrow \frac{1}{P} \sum_{i=1}^{P} x^i_t + (x^l_{t+W} - x^l_t)

    In the cycling phase one sum is in flight at a time, in full precision, with the W it was
    started with. Where one sum ends and the next is due, the first is merged first. A sum that is
    in flight when the cool-down begins is merged on its first step, before the average. In
    blocking phases every step ends with the mean of all nodes: ``wire="bf16"`` sends the
    difference to the last mean r in 16 bits and adds the error e of the cast to the next
    difference; the first step of a phase and ``wire=None`` send full precision.

    ``nonfinite``: as in :class:`Average`, for one more model of memory.

    Plateaus are detected in the losses passed to ``replica.report_loss``, averaged over all ranks
    that report, once in ``report_every`` steps of the cycling phase.

    Bytes sent per exchange, by one rank of the node: 2 (P-1)/P of the model's (of half of it with
    16 bits), and the model inside the node. Extra memory: one model, float32 for 16-bit
    parameters, and for these a second one, of what their rounding takes from the node's model; with
    blocking phases of 16-bit messages 1.5 more, and one more with ``merge="exact"``. Passes over
    memory: one to start a sum and two to merge it; three for a blocking average.

    Source: Coquelin et al. 2021, section 3 and eq. 1. There blocking averages cast parameters
    themselves to 16 bits, which rounds small updates away.

    >>> StaleAverage(cycle=Cycle(every=8), wire=None).cycle.start.wait
    2
    """

    cycle: Cycle = field(default_factory=Cycle)
    wire: Literal["bf16"] | Annotated[None, "full precision"] = "bf16"
    over: Literal["world", "node"] = "node"
    merge: Literal["weighted", "exact"] = "weighted"
    nonfinite: Nonfinite = "raise"
    takes_weights: ClassVar[bool] = True
    # A sum that has not arrived is dropped, and a blocking average made again.
    on_loss: ClassVar[OnLoss] = "again"

    def __post_init__(self) -> None:
        check_settings(self)

    def bind(self, site: Site) -> "BoundStaleAverage":
        """Allocate the sum and, if a blocking phase uses them, the 16-bit messages."""
        wire = self.wire if self.cycle.blocks_ever else None
        rotation = Rotation.of(site, wire, self.merge)
        guard = Guard.of(site, self.nonfinite)
        bound = BoundStaleAverage(site, self, rotation, self.cycle.start, guard)
        bound.losses = 0 if site.weights is None else 0.0
        return bound


@dataclass(eq=False)
class BoundStaleAverage(BoundParameters):
    """:class:`StaleAverage` on one replica."""

    site: Site
    settings: StaleAverage
    rotation: Rotation
    cadence: Cadence
    guard: Guard
    steps: int = 0
    newest: int = 0  # the step count at which the parameters received last were sent
    loss: float | Tensor = 0.0  # the sum of the losses reported since the last window
    losses: float = 0  # their number; a sum of weights, in a run that has them
    is_told: bool = False  # that a window had none, or one had some

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        return [list(node) for node in self.site.world.nodes]

    def state(self) -> Iterator[Variable]:
        """Yield the sum in flight, the errors of casts, B and W, and the loss statistics."""
        yield Variable("nodes", "shared", lambda: self.nodes, lambda _: None, self._fault_of_nodes)
        yield plain("shared", self, "steps", count_fault)
        yield plain("shared", self, "newest", count_fault)
        yield Variable(
            "pace",
            "shared",
            lambda: asdict(self.cadence),
            lambda saved: setattr(self, "cadence", Cadence(**saved)),
            self._fault_of_pace,
            is_compared=True,
        )
        yield Variable(
            "loss", "own", lambda: float(self.loss), lambda loss: setattr(self, "loss", loss)
        )
        yield plain("own", self, "losses", count_fault)
        yield from self.rotation.state()
        yield from self.guard.state()

    def unfit(self, saved: Saved) -> str | None:
        """Return why the state cannot be, or None."""
        if (fault := super().unfit(saved)) is not None:
            return fault
        steps, newest = saved["steps"], saved["newest"]
        if newest > steps:
            return f"parameters that were sent in step {newest} cannot have arrived in step {steps}"
        if saved["flight"] and not self._can_be_in_flight(saved["flight"], steps):
            return f"no sum can be in flight as {ascii(saved['flight'])[:60]} after {steps} steps"
        return None

    def _can_be_in_flight(self, flight: list[object], steps: int) -> bool:
        match flight:
            case [int(root), int(wait), int(due)] if bool not in map(type, flight):
                was_sent = 0 <= due - wait < steps <= due
                longest = self.settings.cycle.start.wait
                return 0 <= root < self.site.slices and 1 <= wait <= longest and was_sent
        return False

    def _fault_of_nodes(self, saved: list[list[int]]) -> str | None:
        if saved == self.nodes:
            return None
        return (
            f"found the state of the nodes {ascii(saved)[:60]}, but these are {self.nodes}; start "
            "on the same nodes, or call finish() before saving"
        )

    def _fault_of_pace(self, saved: dict[str, Any]) -> str | None:
        if self.settings.cycle.reaches(Cadence(**saved)):
            return None
        return f"{self.settings.cycle} never comes to the cadence {saved}"

    def step(self, step: int) -> None:
        """Merge the sum that is due, then average or start the next sum."""
        rotation, cycle = self.rotation, self.settings.cycle
        blocking = cycle.is_blocking(step)
        # At the end of a window B may become one that sends now.
        may_send = cycle.sends(step, self.cadence) or cycle.ends_window(step)
        self.guard.check(blocking or may_send)
        self.steps, pending = step + 1, rotation.pending
        if pending is not None and (blocking or step >= pending.due):
            self.drain()
        self._update_cadence(step)
        if blocking:
            self._warn_beyond_end(step)
            rotation.average(exact=cycle.opens(step))
            self.newest = self.steps
        elif rotation.pending is None and cycle.sends(step, self.cadence):
            rotation.start(self.cadence.wait, step + self.cadence.wait)
        self.guard.keep()

    def report(self, loss: float | Tensor) -> None:
        """Add up the losses on their device, so that the host does not wait for it."""
        weights = self.site.weights
        weight = 1 if weights is None else weights.samples.now
        if weight:
            self.loss = self.loss + weight * torch.as_tensor(loss).detach().double().reshape(())
        self.losses += weight

    def _update_cadence(self, step: int) -> None:
        """Average the losses of all ranks at the end of a window; the cadence follows from it."""
        if self.settings.cycle.ends_window(step):
            assert self.site.control is not None, "a slot in use has a control group"
            reports = gather_numbers([float(self.loss), self.losses], self.site.control)
            self.site.commit(0)
            count = sum(count for _, count in reports)
            if count > 0:
                loss = sum(loss for loss, _ in reports) / count
                self.cadence = self.settings.cycle.after(loss, self.cadence)
            elif not self.is_told:
                self._warn_without_loss()
            self.is_told = True
        elif not self.settings.cycle.is_blocking(step):
            return
        self.loss, self.losses = 0.0, type(self.losses)(0)

    def _warn_beyond_end(self, step: int) -> None:
        if step == self.settings.cycle.total_steps and self.site.world.rank == 0:
            warn(
                f"step {step + 1} is beyond total_steps={step}: this and all later ones average "
                "and wait, as in the cool-down; give the number of steps of the whole run"
            )

    def _warn_without_loss(self) -> None:
        if self.site.world.rank == 0:
            warn(
                f"no rank has reported a loss in {self.settings.cycle.report_every} steps of "
                f"cycling, so B and W stay {self.cadence.every} and {self.cadence.wait}; call "
                "replica.report_loss(loss) before replica.step()"
            )

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters, merged with the sum in flight if there is one, with weight one."""
        self.guard.require()
        return *self.rotation.merged(), 1.0

    def drain(self) -> float:
        """Merge the sum in flight before its time; all ranks call."""
        if (pending := self.rotation.pending) is not None:
            self.rotation.merge()
            self.newest = pending.due - pending.wait + 1
        return 1.0

    def succeed(self, earlier: BoundParameters) -> None:
        """Take over; turns begin anew, as one rank may have begun one more than another."""
        super().succeed(earlier)
        self.rotation.turn = 0

    def windows(self) -> list[Window]:
        """Return the window since the last exchange, for each flat tensor."""
        return [self.rotation.window] * len(self.rotation.flat)

    def reset(self) -> None:
        """Start anew from equal replicas, which become the reference; discard the sum in flight."""
        self.rotation.restart()
        self.newest = self.steps
        self.guard.keep()

    def staleness(self, step: int) -> int:
        """Return the number of steps since the parameters merged last were sent."""
        return step - self.newest

    def measures(self) -> dict[str, float]:
        """Return the current B and W, 1 and 0 in blocking phases, and the progress they leave."""
        every, wait = self.cadence.every, self.cadence.wait
        if self.steps and self.settings.cycle.is_blocking(self.steps - 1):
            every, wait = 1, 0
        left = 1.0 if self.settings.merge == "exact" else progress(every, wait, self.site.size)
        return {"every": every, "wait": wait, "progress": left, **self.guard.measures()}
