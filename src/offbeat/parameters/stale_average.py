"""The average between nodes of parameters that are some steps old, and blocking ones around it."""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Literal, final

import torch
from torch import Tensor

from offbeat.collectives import Handle, all_reduce, broadcast, gather_numbers, mean
from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import Layout, memory, merge, narrow, pack, wide
from offbeat.groups import Group
from offbeat.parameters.cycle import Cycle, Pace


@dataclass(eq=False)
class Flight:
    """A sum on its way: who speaks for the node, W, and the step that merges it."""

    root: int
    wait: int
    due: int
    handles: list[Handle] = field(default_factory=list)

    def land(self) -> None:
        """Block until the sum is there; twice does nothing more."""
        while self.handles:
            self.handles.pop().wait()


@dataclass(eq=False)
class StaleAverageState:
    """What :class:`StaleAverage` knows of one replica.

    ``flat`` holds the sum that travels or, in a blocking phase, the reference that all share: the
    last result; ``views`` is the same by name. ``error`` is what casts took from the node's
    differences, the same on all of its ranks; ``message`` is what they are cast into. ``turn``
    counts exchanges, ``steps`` steps, and ``newest`` those after which the parameters that came
    last were sent.
    """

    site: Site
    layout: Layout
    flat: list[Tensor]
    views: dict[str, Tensor]
    error: list[Tensor]
    message: list[Tensor]
    pace: Pace
    flight: Flight | None = None
    turn: int = 0
    steps: int = 0
    newest: int = 0
    loss: float | Tensor = 0.0
    losses: int = 0

    def speaks(self, root: int) -> bool:
        """Whether this rank exchanges for its node when it is the turn of local rank ``root``."""
        return self.site.inside is None or self.site.inside.rank == root

    def pieces(self, *flat: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """The parameters as flat tensors, each with its places in flat sections."""
        for name, place in self.layout.places.items():
            part = slice(place.offset, place.offset + prod(place.shape))
            x = _as_memory(self.site.parameters[name], self.site.device)
            yield x, *(sections[place.section][part] for sections in flat)


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
        layout = Layout.of(site.parameters, site.slices)
        flat = _wide(layout, site.device)
        casts = self.wire is not None and self.cycle.blocks_ever
        error = [torch.zeros_like(part) for part in flat if casts]
        message = [torch.zeros_like(part, dtype=torch.bfloat16) for part in error]
        views = layout.views(flat)
        state = StaleAverageState(site, layout, flat, views, error, message, self.cycle.start)
        self.settle(state)
        return state

    def step(self, state: StaleAverageState, step: int) -> None:
        """Merge what is due, then average or start the next sum."""
        state.steps, blocking = step + 1, self.cycle.is_blocking(step)
        flight = state.flight
        if flight is not None and (blocking or step >= flight.due):
            _merge(state, flight)
        self._listen(state, step)
        if blocking:
            self._average(state, step)
        elif state.flight is None and self.cycle.sends(step, state.pace):
            _start(state)

    def _average(self, state: StaleAverageState, step: int) -> None:
        if step == self.cycle.total_steps and state.site.groups.rank == 0:
            warnings.warn(
                f"step {step + 1} is beyond total_steps={step}: this and all later ones average "
                "and wait, as in the cool-down; give the number of steps of the whole run",
                RuntimeWarning,
                stacklevel=6,
            )
        root, state.turn = state.turn % state.site.slices, state.turn + 1
        if self.cycle.opens(step) or not state.error:
            _mean(state, root)
        else:
            _narrow_mean(state, root)
        _hand_out(state, root)
        state.newest = state.steps

    def _listen(self, state: StaleAverageState, step: int) -> None:
        """Hear all ranks' losses at the end of a window; every rank comes to the same pace."""
        site = state.site
        if self.cycle.listens(step):
            assert site.world is not None, "there are participants, so there is a world"
            heard = gather_numbers([float(state.loss), state.losses], site.world)
            count = sum(count for _, count in heard)
            if count > 0:
                loss = sum(loss for loss, _ in heard) / count
                state.pace = self.cycle.after(loss, state.pace)
        elif not self.cycle.is_blocking(step):
            return
        state.loss, state.losses = 0.0, 0

    def report(self, state: StaleAverageState, loss: float | Tensor) -> None:
        """Add the loss up, where it lies: nobody waits for a GPU."""
        state.loss = state.loss + torch.as_tensor(loss).detach().double().reshape(())
        state.losses += 1

    def mass(self, state: StaleAverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """The parameters, merged with the sum in flight if there is one; weight one."""
        site, flight = state.site, state.flight
        flat = _wide(state.layout, site.device, site.chunks)
        views = state.layout.views(flat)
        if flight is None:
            pack(views.values(), site.parameters.values())
            return flat, views, 1.0
        whole = [part[: len(total)] for part, total in zip(flat, state.flat, strict=True)]
        if state.speaks(flight.root):
            flight.land()
            for part, total in zip(whole, state.flat, strict=True):
                part.copy_(total)
            for x, total in state.pieces(whole):
                merge(total, x, flight.wait, site.size)
        _broadcast(site, whole, flight.root)
        return flat, views, 1.0

    def settle(self, state: StaleAverageState) -> None:
        """Start anew from equal replicas: they are the reference, nothing is in flight."""
        if state.flight is not None:
            state.flight.land()  # before anything is written where the sum arrives
        state.flight, state.newest = None, state.steps
        for error in state.error:
            error.zero_()
        pack(state.views.values(), state.site.parameters.values())

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
        flight, site = state.flight, state.site
        total, error = (_wide(state.layout, "cpu") for _ in range(2))
        if flight is not None and state.speaks(flight.root):
            flight.land()
            for part, arrived in zip(total, state.flat, strict=True):
                part.copy_(arrived)
        for part, kept in zip(error, state.error, strict=False):
            part.copy_(kept)
        return {
            "nodes": [list(node) for node in site.groups.nodes],
            "turn": state.turn,
            "steps": state.steps,
            "newest": state.newest,
            "pace": asdict(state.pace),
            "loss": float(state.loss),
            "losses": state.losses,
            "flight": [flight.root, flight.wait, flight.due] if flight is not None else [],
            "sum": state.layout.views(total),
            "error": state.layout.views(error) if state.error else {},
        }

    def load(self, state: StaleAverageState, saved: Saved) -> None:
        """Take over what was in flight and B and W; only between the same nodes."""
        nodes = [list(node) for node in state.site.groups.nodes]
        if saved["nodes"] != nodes:
            raise ValueError(
                f"found the state of the nodes {saved['nodes']}, but these are {nodes}; start on "
                "the same nodes, or call finish() before saving"
            )
        self.settle(state)
        state.turn, state.steps, state.newest = saved["turn"], saved["steps"], saved["newest"]
        state.pace = Pace(**saved["pace"])
        state.loss, state.losses = saved["loss"], saved["losses"]
        if saved["error"]:
            views = state.layout.views(state.error)
            pack(views.values(), [saved["error"][name] for name in views])
        if saved["flight"]:
            state.flight = Flight(*saved["flight"])
            pack(state.views.values(), [saved["sum"][name] for name in state.views])


def _start(state: StaleAverageState) -> None:
    root, state.turn = state.turn % state.site.slices, state.turn + 1
    handles = []
    if state.speaks(root):
        group = _counterparts(state)
        pack(state.views.values(), state.site.parameters.values())
        handles = [all_reduce(part, group) for part in _filled(state.flat)]
    wait = state.pace.wait
    state.flight = Flight(root, wait, state.steps - 1 + wait, handles)


def _merge(state: StaleAverageState, flight: Flight) -> None:
    if state.speaks(flight.root):
        flight.land()
        for x, total in state.pieces(state.flat):
            merge(total, x, flight.wait, state.site.size)
    _hand_out(state, flight.root)
    state.flight, state.newest = None, flight.due - flight.wait + 1


def _mean(state: StaleAverageState, root: int) -> None:
    """The mean of the nodes' models, in full precision: from here on all share a reference."""
    for error in state.error:
        error.zero_()
    if state.speaks(root):
        group = _counterparts(state)
        pack(state.views.values(), state.site.parameters.values())
        for handle in [mean(part, group) for part in _filled(state.flat)]:
            handle.wait()


def _narrow_mean(state: StaleAverageState, root: int) -> None:
    """The same from 16-bit differences to the reference."""
    if state.site.group is None:
        return
    # Every rank whose turn may come casts, so that all of a node know what its casts took: the
    # ranks of a node hold the same model and the same reference.
    for x, reference, error, message in state.pieces(state.flat, state.error, state.message):
        narrow(x, reference, error, message)
    if state.speaks(root):
        for handle in [mean(part, state.site.group) for part in _filled(state.message)]:
            handle.wait()
        for reference, difference in zip(state.flat, state.message, strict=True):
            reference.add_(difference)


def _hand_out(state: StaleAverageState, root: int) -> None:
    """Give what the speaker holds to all of the node, as their parameters."""
    _broadcast(state.site, state.flat, root)
    parameters = state.site.parameters.values()
    pack(parameters, state.views.values())
    if any(
        part.dtype != dtype for part, dtype in zip(state.flat, state.layout.dtypes, strict=True)
    ):
        # A reference is what all hold, as it was rounded; then it need not be saved.
        pack(state.views.values(), parameters)


def _broadcast(site: Site, flat: list[Tensor], root: int) -> None:
    if site.inside is not None:
        for handle in [broadcast(part, root, site.inside) for part in _filled(flat)]:
            handle.wait()


def _counterparts(state: StaleAverageState) -> Group:
    assert state.site.group is not None, "who speaks for a node has counterparts on the others"
    return state.site.group


def _filled(flat: list[Tensor]) -> list[Tensor]:
    """Without empty sections, which a group may not send."""
    return [part for part in flat if part.numel() > 0]


def _wide(layout: Layout, device: torch.device | str, chunks: int = 0) -> list[Tensor]:
    return [part.to(wide(part.dtype)) for part in layout.empty(device, chunks)]


def _as_memory(parameter: Tensor, device: torch.device) -> Tensor:
    """A parameter as its memory lies; a copy where it lies elsewhere or has gaps."""
    own = memory(parameter) if parameter.device == device else None
    if own is None:
        own = memory(torch.empty_like(parameter, device=device).copy_(parameter))
    assert own is not None, "a copy has no gaps"
    return own
