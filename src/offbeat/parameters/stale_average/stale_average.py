"""DASO's exchange between nodes: stale averages, and blocking ones before and after."""

import warnings
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from offbeat.comm.small_gathers import gather_numbers
from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import pack, progress
from offbeat.parameters.nonfinite import Guard, Nonfinite
from offbeat.parameters.stale_average.rotation import PendingSum, Rotation
from offbeat.schedule import Cadence, Cycle
from offbeat.settings import check_settings


@dataclass(eq=False)
class StaleAverageState:
    """State of :class:`StaleAverage` on one replica.

    ``loss`` is the sum of ``losses`` reports since the last window; ``is_told``: there was one
    in an earlier window, or the warning that there is none. ``steps`` counts steps, and
    ``newest`` is the step count at which the parameters received last were sent.
    """

    site: Site
    rotation: Rotation
    cadence: Cadence
    guard: Guard
    steps: int = 0
    newest: int = 0
    loss: float | Tensor = 0.0
    losses: int = 0
    is_told: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class StaleAverage(ParameterExchange[StaleAverageState]):
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

    Parameters of a rank that are not finite before they are sent are the same error on all ranks.
    With ``nonfinite="skip"`` that rank returns to those after its step before, in any step; a
    second time in a row is an error. For one more model of memory.

    Plateaus are detected in the losses passed to ``replica.report_loss``, averaged over all ranks
    that report, once in ``report_every`` steps of the cycling phase.

    Bytes sent per exchange, by one rank of the node: 2 (P-1)/P of the model's (of half of it with
    16 bits), and the model inside the node. Extra memory: one model, float32 for 16-bit
    parameters, and for these a second one, of what their rounding takes from the node's model; with
    16-bit messages 1.5 more, and one more with ``merge="exact"``. Passes over memory: one to start
    a sum and two to merge it; three for a blocking average.

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

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)

    def init(self, site: Site) -> StaleAverageState:
        """Allocate the sum and, if a blocking phase uses them, the 16-bit messages."""
        wire = self.wire if self.cycle.blocks_ever else None
        rotation = Rotation.of(site, wire, self.merge)
        guard = Guard.of(site, self.nonfinite)
        return StaleAverageState(site, rotation, self.cycle.start, guard)

    def step(self, state: StaleAverageState, step: int) -> None:
        """Merge the sum that is due, then average or start the next sum."""
        rotation, blocking = state.rotation, self.cycle.is_blocking(step)
        # At the end of a window B may become one that sends now.
        may_send = self.cycle.sends(step, state.cadence) or self.cycle.ends_window(step)
        state.guard.check(blocking or may_send)
        state.steps, pending = step + 1, rotation.pending
        if pending is not None and (blocking or step >= pending.due):
            rotation.merge()
            state.newest = pending.due - pending.wait + 1
        self._update_cadence(state, step)
        if blocking:
            self._warn_beyond_end(state, step)
            rotation.average(exact=self.cycle.opens(step))
            state.newest = state.steps
        elif rotation.pending is None and self.cycle.sends(step, state.cadence):
            rotation.start(state.cadence.wait, step + state.cadence.wait)
        state.guard.keep()

    def report(self, state: StaleAverageState, loss: float | Tensor) -> None:
        """Add up the losses on their device, so that the host does not wait for it."""
        state.loss = state.loss + torch.as_tensor(loss).detach().double().reshape(())
        state.losses += 1

    def _update_cadence(self, state: StaleAverageState, step: int) -> None:
        """Average the losses of all ranks at the end of a window; the cadence follows from it."""
        if self.cycle.ends_window(step):
            assert state.site.control is not None, "a slot in use has a control group"
            reports = gather_numbers([float(state.loss), state.losses], state.site.control)
            count = sum(count for _, count in reports)
            if count > 0:
                loss = sum(loss for loss, _ in reports) / count
                state.cadence = self.cycle.after(loss, state.cadence)
            elif not state.is_told:
                self._warn_without_loss(state)
            state.is_told = True
        elif not self.cycle.is_blocking(step):
            return
        state.loss, state.losses = 0.0, 0

    def _warn_beyond_end(self, state: StaleAverageState, step: int) -> None:
        if step == self.cycle.total_steps and state.site.world.rank == 0:
            warnings.warn(
                f"step {step + 1} is beyond total_steps={step}: this and all later ones average "
                "and wait, as in the cool-down; give the number of steps of the whole run",
                RuntimeWarning,
                stacklevel=9,
            )

    def _warn_without_loss(self, state: StaleAverageState) -> None:
        if state.site.world.rank == 0:
            warnings.warn(
                f"no rank has reported a loss in {self.cycle.report_every} steps of cycling, so B "
                f"and W stay {state.cadence.every} and {state.cadence.wait}; call "
                "replica.report_loss(loss) before replica.step()",
                RuntimeWarning,
                stacklevel=10,
            )

    def mass(self, state: StaleAverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters, merged with the sum in flight if there is one, with weight one."""
        state.guard.require()
        return *state.rotation.merged(), 1.0

    def settle(self, state: StaleAverageState) -> None:
        """Start anew from equal replicas, which become the reference; discard the sum in flight."""
        state.rotation.restart()
        state.newest = state.steps
        state.guard.keep()

    def staleness(self, state: StaleAverageState, step: int) -> int:
        """Return the number of steps since the parameters merged last were sent."""
        return step - state.newest

    def measures(self, state: StaleAverageState) -> dict[str, float]:
        """Return the current B and W, 1 and 0 in blocking phases, and the progress they leave.

        That is :func:`offbeat.functional.progress`, 1 with the merge "exact". With "skip" also the
        number of steps that this rank has skipped.
        """
        every, wait = state.cadence.every, state.cadence.wait
        if state.steps and self.cycle.is_blocking(state.steps - 1):
            every, wait = 1, 0
        left = 1.0 if self.merge == "exact" else progress(every, wait, state.site.size)
        return {"every": every, "wait": wait, "progress": left, **state.guard.measures()}

    def save(self, state: StaleAverageState) -> Saved:
        """Return the sum in flight, the errors of casts, B and W, and the loss statistics.

        Between steps the reference equals the node's model: the parameters and what rounding took.
        """
        rotation, pending = state.rotation, state.rotation.pending
        return {
            "nodes": [list(node) for node in state.site.world.nodes],
            "turn": rotation.turn,
            "steps": state.steps,
            "newest": state.newest,
            "pace": asdict(state.cadence),
            "loss": float(state.loss),
            "losses": state.losses,
            "flight": [pending.root, pending.wait, pending.due] if pending is not None else [],
            "sum": rotation.pending_sum(),
            **({"sent": rotation.pending_sent()} if self.merge == "exact" else {}),
            "error": {n: v.cpu().clone() for n, v in rotation.layout.views(rotation.error).items()}
            if rotation.error
            else {},
            **({"carry": rotation.carried()} if rotation.carry else {}),
            **state.guard.save(),
        }

    def unfit(self, state: StaleAverageState, saved: Saved) -> str | None:
        """Return why the nodes, the counts, B and W or the sum in flight cannot be, or None."""
        nodes = [list(node) for node in state.site.world.nodes]
        if saved["nodes"] != nodes:
            return (
                f"found the state of the nodes {ascii(saved['nodes'])[:60]}, but these are "
                f"{nodes}; start on the same nodes, or call finish() before saving"
            )
        counts = {name: saved[name] for name in ("turn", "steps", "newest", "losses")}
        if min(counts.values()) < 0 or saved["newest"] > saved["steps"]:
            return f"the counts {counts} cannot be"
        if not self.cycle.reaches(Cadence(**saved["pace"])):
            return f"{self.cycle} never comes to the cadence {saved['pace']}"
        flight = saved["flight"]
        if flight and not self._can_be_in_flight(flight, saved["steps"], state.site.slices):
            return f"no sum can be in flight as {ascii(flight)[:60]} after {saved['steps']} steps"
        return state.guard.unfit(saved)

    def _can_be_in_flight(self, flight: list[object], steps: int, slices: int) -> bool:
        match flight:
            case [int(root), int(wait), int(due)] if bool not in map(type, flight):
                was_sent = 0 <= due - wait < steps <= due
                return 0 <= root < slices and 1 <= wait <= self.cycle.start.wait and was_sent
        return False

    def shared(self, saved: Saved) -> Saved:
        """Return all that decides when the ranks exchange."""
        return {name: saved[name] for name in ("turn", "steps", "newest", "pace", "flight")}

    def load(self, state: StaleAverageState, saved: Saved) -> None:
        """Restore the sum in flight and B and W."""
        self.settle(state)
        state.guard.load(saved)
        rotation, state.cadence = state.rotation, Cadence(**saved["pace"])
        rotation.turn, state.steps, state.newest = saved["turn"], saved["steps"], saved["newest"]
        state.loss, state.losses = saved["loss"], saved["losses"]
        if rotation.error:
            views = rotation.layout.views(rotation.error)
            pack(views.values(), [saved["error"][name] for name in views])
        if rotation.carry:
            rotation.restore_carry(saved["carry"])
        if saved["flight"]:
            rotation.pending = PendingSum(*saved["flight"])
            pack(rotation.views.values(), [saved["sum"][name] for name in rotation.views])
            if rotation.sent:
                views = rotation.layout.views(rotation.sent)
                pack(views.values(), [saved["sent"][name] for name in views])
