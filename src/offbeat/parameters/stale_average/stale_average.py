"""The average between nodes of parameters that are some steps old, and blocking ones around it."""

import warnings
from dataclasses import asdict, dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from offbeat.comm.agreement import gather_numbers
from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import pack
from offbeat.parameters.stale_average.rotation import PendingSum, Rotation
from offbeat.schedule import Cadence, Cycle


@dataclass(eq=False)
class StaleAverageState:
    """What :class:`StaleAverage` knows of one replica.

    ``loss`` is the sum of ``losses`` reports since the last window. ``steps`` counts steps, and
    ``newest`` those after which the parameters that came last were sent.
    """

    site: Site
    turns: Rotation
    pace: Cadence
    steps: int = 0
    newest: int = 0
    loss: float | Tensor = 0.0
    losses: int = 0


@final
@dataclass(frozen=True)
class StaleAverage(ParameterExchange[StaleAverageState]):
    r"""DASO's exchange between nodes: sums that travel while all train on, merged W steps later.

    .. math::
        x^l_{t+W} \leftarrow \frac{2W x^l_{t+W} + \sum_{i=1}^{P} x^i_t}{2W + P}
        \quad \text{(cycling)}, \qquad
        x^l \leftarrow r + \frac{1}{P} \sum_{i=1}^{P} \mathrm{cast}(x^i - r + e^i)
        \quad \text{(warm-up, cool-down)}

    P nodes take part, whatever their size. One group of ranks with equal local rank exchanges at
    a time, the next one after each exchange; in every node its member then broadcasts the result.
    There are as many groups as the smallest node has ranks. :class:`Cycle` says when.

    In cycling one sum travels at a time, in full precision, with the W it was started with. Where
    one ends and the next is due, it is merged first. What travels when the cool-down begins is
    merged with its first step, before the average. In blocking phases all take the mean after
    every step: ``wire="bf16"`` sends the difference to the last mean r in 16 bits and adds what
    the cast took, e, to the next; the first step of a phase and ``wire=None`` send 32 bits.

    ``replica.report_loss`` tells the losses from which plateaus are seen: averaged over all ranks
    that report, once in ``report_every`` steps of cycling.

    Bytes sent per exchange, by one rank of the node: 2 (P-1)/P of the model's (of half of it with
    16 bits), and the model inside the node. Extra memory: one model, float32 for 16-bit
    parameters; with 16 bits on the wire 1.5 more. Passes over memory: one to start a sum and two
    to merge it; three for a blocking average.

    Source: Coquelin et al. 2021, section 3 and eq. 1. There blocking averages cast parameters
    themselves to 16 bits, which rounds small updates away.

    >>> StaleAverage(Cycle(every=8), wire=None).cycle.start.wait
    2
    """

    cycle: Cycle = field(default_factory=Cycle)
    wire: Literal["bf16"] | None = "bf16"
    over: Literal["world", "node"] = "node"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if not isinstance(self.cycle, Cycle):
            raise ValueError(f"cycle={self.cycle!r}, expected an offbeat.parameters.Cycle")
        if self.wire not in (None, "bf16"):
            raise ValueError(f"wire={self.wire!r}, expected None (full precision) or 'bf16'")
        if self.over not in ("world", "node"):
            raise ValueError(f"over={self.over!r}, expected 'world' or 'node'")

    def init(self, site: Site) -> StaleAverageState:
        """Allocate the sum and, where there is use for them, the 16-bit messages."""
        turns = Rotation.of(site, self.wire if self.cycle.blocks_ever else None)
        return StaleAverageState(site, turns, self.cycle.start)

    def step(self, state: StaleAverageState, step: int) -> None:
        """Merge what is due, then average or start the next sum."""
        turns, blocking = state.turns, self.cycle.is_blocking(step)
        state.steps, flight = step + 1, turns.flight
        if flight is not None and (blocking or step >= flight.due):
            turns.land()
            state.newest = flight.due - flight.wait + 1
        self._listen(state, step)
        if blocking:
            self._warn(state, step)
            turns.average(exact=self.cycle.opens(step))
            state.newest = state.steps
        elif turns.flight is None and self.cycle.sends(step, state.pace):
            turns.start(state.pace.wait, step + state.pace.wait)

    def report(self, state: StaleAverageState, loss: float | Tensor) -> None:
        """Add the loss up, where it lies: nobody waits for a GPU."""
        state.loss = state.loss + torch.as_tensor(loss).detach().double().reshape(())
        state.losses += 1

    def _listen(self, state: StaleAverageState, step: int) -> None:
        """Hear all ranks' losses at the end of a window; every rank comes to the same pace."""
        if self.cycle.listens(step):
            assert state.site.control is not None, "there are participants, so there is a world"
            heard = gather_numbers([float(state.loss), state.losses], state.site.control)
            count = sum(count for _, count in heard)
            if count > 0:
                loss = sum(loss for loss, _ in heard) / count
                state.pace = self.cycle.after(loss, state.pace)
        elif not self.cycle.is_blocking(step):
            return
        state.loss, state.losses = 0.0, 0

    def _warn(self, state: StaleAverageState, step: int) -> None:
        if step == self.cycle.total_steps and state.site.world.rank == 0:
            warnings.warn(
                f"step {step + 1} is beyond total_steps={step}: this and all later ones average "
                "and wait, as in the cool-down; give the number of steps of the whole run",
                RuntimeWarning,
                stacklevel=6,
            )

    def mass(self, state: StaleAverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """The parameters, merged with the sum in flight if there is one; weight one."""
        return *state.turns.merged(), 1.0

    def settle(self, state: StaleAverageState) -> None:
        """Start anew from equal replicas: they are the reference, nothing is in flight."""
        state.turns.restart()
        state.newest = state.steps

    def staleness(self, state: StaleAverageState, step: int) -> int:
        """Steps since what was merged last was sent."""
        return step - state.newest

    def measures(self, state: StaleAverageState) -> dict[str, float]:
        """B and W of the moment: 1 and 0 in blocking phases."""
        if state.steps and self.cycle.is_blocking(state.steps - 1):
            return {"every": 1, "wait": 0}
        return {"every": state.pace.every, "wait": state.pace.wait}

    def save(self, state: StaleAverageState) -> Saved:
        """The sum in flight, what casts took, B and W, and what is known of the loss.

        The reference equals the parameters between steps.
        """
        turns, flight = state.turns, state.turns.flight
        return {
            "nodes": [list(node) for node in state.site.world.nodes],
            "turn": turns.turn,
            "steps": state.steps,
            "newest": state.newest,
            "pace": asdict(state.pace),
            "loss": float(state.loss),
            "losses": state.losses,
            "flight": [flight.root, flight.wait, flight.due] if flight is not None else [],
            "sum": turns.arrived(),
            "error": {n: v.cpu().clone() for n, v in turns.layout.views(turns.error).items()}
            if turns.error
            else {},
        }

    def load(self, state: StaleAverageState, saved: Saved) -> None:
        """Take over what was in flight and B and W; only between the same nodes."""
        nodes = [list(node) for node in state.site.world.nodes]
        if saved["nodes"] != nodes:
            raise ValueError(
                f"found the state of the nodes {saved['nodes']}, but these are {nodes}; start on "
                "the same nodes, or call finish() before saving"
            )
        self.settle(state)
        turns, state.pace = state.turns, Cadence(**saved["pace"])
        turns.turn, state.steps, state.newest = saved["turn"], saved["steps"], saved["newest"]
        state.loss, state.losses = saved["loss"], saved["losses"]
        if turns.error:
            views = turns.layout.views(turns.error)
            pack(views.values(), [saved["error"][name] for name in views])
        if saved["flight"]:
            turns.flight = PendingSum(*saved["flight"])
            pack(turns.views.values(), [saved["sum"][name] for name in turns.views])
