"""The largest entries of each layer, exchanged while backward goes on, and a memory of the rest."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from offbeat.comm.agreement import raise_alike
from offbeat.comm.group import Group
from offbeat.exchange import GradientExchange, Saved, Site
from offbeat.functional import warm_density
from offbeat.gradients.bucket import agree_on_order, require_first
from offbeat.gradients.top_k.message import Message
from offbeat.gradients.top_k.plan import MessagePlan
from offbeat.gradients.top_k.summary import summary
from offbeat.gradients.top_k.timing import LayerTimer, LayerTimes, average_times
from offbeat.gradients.top_k.units import Scale, Units, optimizer_fault
from offbeat.settings import above, at_least, between, check_settings

WATCHED = 5  # backwards whose times decide about ratios


@dataclass(eq=False)
class TopKState:
    """What :class:`TopK` knows of one replica; residuals and velocities live in its messages."""

    site: Site
    group: Group
    units: Units
    plan: MessagePlan
    order: list[str]
    order_is_measured: bool = False
    exchanges: int = 0
    seen: list[str] = field(default_factory=list)
    first_seen: list[str] = field(default_factory=list)  # in the first exchange
    messages: list[Message] = field(default_factory=list)
    home: dict[str, Message] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)  # of this backward
    launched: int = 0
    densities: dict[str, float] = field(default_factory=dict)  # where they were adapted
    pace: LayerTimer | None = None  # while backwards are watched
    times: LayerTimes | None = None  # what the last watch found
    waited: float = 0.0  # seconds, at the end of the last backward


@final
@dataclass(frozen=True, kw_only=True)
class TopK(GradientExchange[TopKState]):
    r"""Send the k largest entries of every layer, keep the others for later (LAGS-SGD).

    .. math::
        acc_t = \epsilon_{t-1} + \alpha_t G_t, \quad \epsilon_t = acc_t - TopK(acc_t, k), \quad
        g_t = \frac{1}{P} \sum_{p=1}^{P} TopK(acc^p_t, k^{(l)})

    for each layer l (parameter tensor) by itself, with k = max(1, floor(density * d)) on every
    rank. With a ``torch.optim.SGD`` given to ``replicate(optimizer=...)`` residuals
    :math:`\epsilon` are in units of learning rate times gradient and ``.grad`` becomes
    :math:`g_t / \alpha_t`; with another optimizer, or none, :math:`\alpha_t = 1`. ``units``
    ("lr" or "gradient") overrides that. A layer that costs no less sparse than dense (about
    where k >= d / P) is sent whole.

    ``scope="model"`` chooses among all entries of the model at once, after backward (SLGS-SGD).
    ``over="local"`` exchanges inside each node only, beside an exchange between nodes.
    ``momentum`` is momentum correction and ``warmup`` the number of steps in which the density
    falls from 1/4 to its value, both as in deep gradient compression.

    Bytes sent per step: (P-1) * 8 k for float32, and 4 for each parameter. Extra memory: one
    model, and two more with momentum. Passes over memory: add, one reading pass to choose (two
    without numba), zero, and the k entries of each rank. If any rank has a gradient that is not
    finite, all ranks' residuals stay as before this backward and every ``.grad`` becomes NaN.

    Source: Shi et al. 2020, Algorithm 1 and section 5; Lin et al. 2018, section 3.
    """

    density: Annotated[float, between(0, 1, closed="right")] | Literal["adaptive"] = 0.001
    selection: Literal["sampled", "exact"] = "sampled"
    momentum: Annotated[float, between(0, 1, closed="left")] = 0.0
    warmup: Annotated[int, at_least(1, "steps")] | None = None
    message_mb: Annotated[float, above(0, "MiB")] = 1 / 16
    scope: Literal["layer", "model"] = "layer"
    units: Literal["lr", "gradient"] | None = None
    max_ratio: Annotated[float, at_least(1)] = 1000.0
    retune: Annotated[int, at_least(WATCHED + 1, "steps")] = 1000
    over: Literal["world", "local"] = "world"

    def __post_init__(self) -> None:
        """Check the settings, and that adaptive densities have layers to choose for."""
        check_settings(self)
        if self.density == "adaptive" and (self.scope == "model" or self.warmup is not None):
            raise ValueError(
                "density='adaptive' chooses by layer and from the first steps on; leave "
                "scope='layer' and warmup=None, or give a number"
            )

    def init(self, site: Site) -> TopKState:
        """Messages in reverse order of registration, until backward shows the real order."""
        assert site.group is not None, "a slot alone in its group is replaced by nothing"
        given = (site.parameters, site.optimizers)
        raise_alike(optimizer_fault(*given, self.units, self.momentum), site.group)
        order = list(site.parameters)[::-1]
        units = Units.of(*given, site.scaler, self.units)
        state = TopKState(site, site.group, units, self._plan(site, 0, {}), order)
        self._build(state)
        return state

    def ready(self, state: TopKState, name: str) -> None:
        """Add this parameter's gradient to its message; launch those that are full, in order."""
        if not state.seen:
            state.scales = state.units.read()
        if state.pace is not None:
            state.pace.enter(name)
        message = state.home[name]
        require_first(state.group, name, message.missing)
        state.seen.append(name)
        message.add(name, state.scales, accumulated=True)
        if state.pace is not None:
            state.pace.added(name)
        while not self.complete(state) and not state.messages[state.launched].missing:
            sent = state.messages[state.launched]
            _launch(state)
            if state.pace is not None:
                parameters = state.site.parameters
                members = [name for name, home in state.home.items() if home is sent]
                state.pace.launched({name: parameters[name].numel() for name in members})

    def complete(self, state: TopKState) -> bool:
        """Whether every message is on its way."""
        return state.launched == len(state.messages)

    def finish(self, state: TopKState) -> None:
        """Send the messages that miss gradients too, wait, and hand out the result."""
        if not state.seen:
            state.scales = state.units.read()
        while not self.complete(state):
            message = state.messages[state.launched]
            for name in [name for name in state.order if name in message.missing]:
                message.add(name, state.scales, accumulated=False)
            _launch(state)
        # All or none: a message may not keep its new residuals while another goes back.
        started = time.perf_counter()
        finite = [message.wait() for message in state.messages]
        state.waited = time.perf_counter() - started
        if all(finite):
            for message in state.messages:
                message.commit()
        else:
            for message in state.messages:
                message.undo()
        state.launched = 0
        state.exchanges += 1
        if self.density == "adaptive":
            self._adapt(state)
        if state.exchanges == 1:
            state.first_seen = list(state.seen)
        state.seen.clear()

    def stepped(self, state: TopKState) -> None:
        """The gradients handed out are spent, and messages may change."""
        for message in state.messages:
            message.stepped()
        # Not in finish: a second backward of the same step must find what the first handed out.
        if state.exchanges > 0:
            self._rebuild_if_due(state)

    def save(self, state: TopKState) -> Saved:
        """Residuals and velocities of this rank by name, and what fixes the messages."""
        return {
            "order": list(state.order),
            "measured": state.order_is_measured,
            "exchanges": state.exchanges,
            "densities": dict(state.densities),
            "residual": _by_name(state, "residual"),
            "velocity": _by_name(state, "velocity") if self.momentum else {},
        }

    def load(self, state: TopKState, saved: Saved) -> None:
        """Take them over."""
        state.order, state.order_is_measured = list(saved["order"]), bool(saved["measured"])
        state.exchanges, state.densities = int(saved["exchanges"]), dict(saved["densities"])
        state.plan = self._plan(state.site, state.exchanges, state.densities)
        self._build(state, saved["residual"], saved["velocity"])

    def inherit(self, saved: Mapping[int, Saved], before: int, rank: int, size: int) -> Saved:
        r"""Keep the mean of the residuals in a world of another size; velocities likewise.

        .. math:: \frac{1}{P'} \sum_{r'} \epsilon_{r'} = \frac{1}{P} \sum_r \epsilon_r

        Means of neighbouring ranks' residuals where the world shrinks by a whole factor, copies
        where it grows by one, the mean of all for everybody otherwise.
        """
        heirs = _heirs(before, rank, size)
        lost = [r for r in heirs if r not in saved]
        if lost:
            raise ValueError(
                f"the residuals of ranks {lost} are missing; every rank saves its own, and rank "
                f"{rank} of {size} needs those of ranks {heirs} of {before}: pass them together, "
                "{**one, **another}"
            )
        merged = dict(saved[heirs[0]])
        for key in {"residual", "velocity"} & merged.keys() if len(heirs) > 1 else ():
            merged[key] = {
                name: torch.stack([saved[r][key][name] for r in heirs]).mean(0)
                for name in merged[key]
            }
        return merged

    def stats(self, state: TopKState) -> Saved:
        """Compression ratios by layer, and what the last watch found."""
        ratios = {name: 1 / state.plan.density_of(name) for name in state.order}
        return {"lags": summary(ratios, state.messages, state.times, state.waited)}

    def _plan(self, site: Site, exchanges: int, densities: Mapping[str, float]) -> MessagePlan:
        adaptive = self.density == "adaptive"
        density = 1 / self.max_ratio if adaptive else float(self.density)
        density = warm_density(density, exchanges, self.warmup or 0)
        return MessagePlan(site, density, self.message_mb, self.scope == "model", densities)

    def _adapt(self, state: TopKState) -> None:
        """Watch some backwards, now and then, and choose ratios from what they took."""
        phase = state.exchanges % self.retune
        if state.pace is not None:
            state.pace.finish()
        if phase == 1:
            state.pace = LayerTimer(next(iter(state.site.parameters.values())).device)
        elif phase == 1 + WATCHED and state.pace is not None:
            state.times, state.pace = average_times(state.pace, state.order, state.group), None
            ratios = state.times.ratios(
                state.site.parameters, self.max_ratio, self.message_mb * 2**20
            )
            state.densities |= {name: 1 / ratio for name, ratio in ratios.items()}

    def _build(
        self,
        state: TopKState,
        residual: Mapping[str, Tensor] | None = None,
        velocity: Mapping[str, Tensor] | None = None,
    ) -> None:
        if residual is None or velocity is None:
            residual, velocity = _by_name(state, "residual"), _by_name(state, "velocity")
        exact = self.selection == "exact"
        state.messages = state.plan.messages(state.order, momentum=self.momentum, exact=exact)
        state.home = {n: message for message in state.messages for n in message.missing}
        for name, message in state.home.items():
            message.remember(name, residual.get(name), velocity.get(name))

    def _rebuild_if_due(self, state: TopKState) -> None:
        """The order of readiness is known after the first backward; the density may fall."""
        plan = self._plan(state.site, state.exchanges, dict(state.densities))
        if state.order_is_measured and plan == state.plan:
            return
        if not state.order_is_measured:
            state.order = agree_on_order(state.order, state.first_seen, state.group)
            state.order_is_measured = True
        state.plan = plan
        self._build(state)


def _launch(state: TopKState) -> None:
    # In one order on every rank, whatever the order of readiness: see Mean.
    state.messages[state.launched].launch(state.scales)
    state.launched += 1


def _by_name(state: TopKState, kind: Literal["residual", "velocity"]) -> dict[str, Tensor]:
    """Copies for all parameters; zeros for those that keep nothing."""
    found = {}
    for name, parameter in state.site.parameters.items():
        kept = getattr(state.home[name], kind).get(name) if name in state.home else None
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        found[name] = zeros if kept is None else zeros.copy_(kept)
    return found


def _heirs(before: int, rank: int, size: int) -> list[int]:
    """The ranks of the old world whose residuals this rank of the new one takes the mean of."""
    if before % size == 0:
        share = before // size
        return list(range(rank * share, (rank + 1) * share))
    return [rank % before] if size % before == 0 else list(range(before))
