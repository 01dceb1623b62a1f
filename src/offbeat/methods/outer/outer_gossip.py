"""NoLoCo: outer steps of slow weights, averaged between the participants of a random pair."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from offbeat.exchange import BoundParameters, ParameterExchange, Site, Variable, scratch, sections
from offbeat.exchange.guard import Guard, Nonfinite
from offbeat.exchange.interface import OnLoss
from offbeat.exchange.weights import Window
from offbeat.functional import Layout, pack
from offbeat.settings import at_least, between, check_settings
from offbeat.topology.schedule import due
from offbeat.transport.messages import exchange
from offbeat.transport.small_gathers import gather_numbers


@final
@dataclass(frozen=True, kw_only=True)
class OuterGossip(ParameterExchange):
    r"""Step slow weights with momentum every ``every`` steps, together with one random partner.

    .. math::
        \delta_i \leftarrow \alpha \delta_i
        + \beta \, \overline{(x - \phi)} - \gamma (\phi_i - \overline{\phi}), \quad
        \phi_i \leftarrow \phi_i + \delta_i, \quad x_i \leftarrow \phi_i
        \quad \text{if } (k+1) \bmod every = 0

    after k earlier steps. Bars are means over a pair of participants, drawn anew in each exchange;
    with an odd number of participants one is alone, and its means are its own values. Each
    participant has slow weights φ and a momentum δ of its own, which begin with the parameters at
    the attach and with 0. There is no all-reduce: no exchange involves more than two participants.

    Args:
        every: steps between two exchanges.
        lr: the paper's beta, the rate of the mean change.
        momentum: the paper's alpha.
        gossip_lr: the paper's gamma, the rate at which the slow weights of a pair approach each
            other; None for ``lr``, as in the authors' code.
        seed: of the pairs. All ranks draw them from it and from the number of the exchange.
        over: "world" for ranks as participants, "node" for nodes: then each local rank exchanges
            and steps its slice, and the node gathers all slices.

    The mean of all φ moves as with one outer step for all, by momentum and ``lr``. The differences
    between them decay if 0 < γ < 2 (1 - α²), in mean square over the pairs of many participants;
    other values are an error. One message holds what the partner needs of both means, β (x - φ) +
    γ φ.

    Slow weights, momentum and messages are float32 for 16-bit parameters, and what rounding takes
    from the parameters counts in the next exchange. ``finish()`` takes the average as slow weights
    and resets the momentum. Load a model before ``replicate()``, or call ``finish()`` after
    loading; otherwise the first step is an error on all ranks. ``nonfinite``: as in
    :class:`Average`.

    Bytes sent per step: the model's divided by ``every``; float32 for 16-bit parameters. Extra
    memory: three models, four with "skip"; during an exchange two more. With ``over="node"`` slow
    weights, momentum and those two are divided between the ranks of a node. Passes over memory per
    exchange: fourteen.

    Source: Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for
    Large Models". Signs are those of the authors' code. The paper's random routing between stages
    of a pipeline is not part of this exchange.

    >>> OuterGossip(momentum=0.9)
    Traceback (most recent call last):
    ValueError: gossip_lr=0.7 with momentum=0.9: ... use 0 < gossip_lr < 0.38, or a lower momentum
    """

    every: Annotated[int, at_least(1, "steps")] = 50
    lr: Annotated[float, at_least(0)] = 0.7
    momentum: Annotated[float, between(0, 1, closed="left")] = 0.5
    gossip_lr: Annotated[float, at_least(0)] | Annotated[None, "that of lr"] = None
    seed: Annotated[int, at_least(0)] = 0
    over: Literal["world", "node"] = "world"
    nonfinite: Nonfinite = "raise"
    takes_weights: ClassVar[bool] = True
    on_loss: ClassVar[OnLoss] = "again"  # pairs of those that are left
    anchored: ClassVar[bool] = True  # the change counts from the parameters at the attach

    def __post_init__(self) -> None:
        check_settings(self)
        limit = 2 * (1 - self.momentum**2)
        if not 0 < self.gamma < limit:
            raise ValueError(
                f"gossip_lr={self.gamma:g} with momentum={self.momentum:g}: the slow weights of "
                f"the participants would not stay together; use 0 < gossip_lr < {limit:.3g}, or a "
                "lower momentum"
            )

    @property
    def gamma(self) -> float:
        """The rate at which the slow weights of a pair approach each other."""
        return self.lr if self.gossip_lr is None else self.gossip_lr

    def partner(self, rank: int, size: int, step: int) -> int:
        """Return with whom ``rank`` of ``size`` exchanges in ``step``; itself if it is alone."""
        order = np.random.default_rng((self.seed, step // self.every)).permutation(size)
        place = int(np.flatnonzero(order == rank)[0]) ^ 1  # places 0 and 1, 2 and 3, ...
        return int(order[place]) if place < size else rank

    def bind(self, site: Site) -> "BoundOuterGossip":
        """Allocate the flat copy of the model, the slow weights and the momentum."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.wide(site.device, site.chunks)
        slow, momentum = ([site.slice(part).clone() for part in flat] for _ in range(2))
        views, guard = layout.views(flat), Guard.of(site, self.nonfinite)
        bound = BoundOuterGossip(
            site, self, layout, flat, views, slow, momentum, guard, Window(site)
        )
        bound.reset()
        return bound


@dataclass(eq=False)
class BoundOuterGossip(BoundParameters):
    """:class:`OuterGossip` on one replica, in the dtype of sums."""

    site: Site
    settings: OuterGossip
    layout: Layout
    flat: list[Tensor]  # a copy of the model, by section
    views: dict[str, Tensor]  # its tensors by name
    slow: list[Tensor]  # this rank's slices
    momentum: list[Tensor]
    guard: Guard
    window: Window

    def state(self) -> Iterator[Variable]:
        """Yield the copy of the model, the slow weights, the momentum and skipped steps."""
        yield scratch("flat", self.flat)
        yield sections("own", "slow", self.slow, self.site, self.layout)
        yield sections("own", "momentum", self.momentum, self.site, self.layout)
        yield from self.guard.state()
        yield from self.window.state()

    def step(self, step: int) -> None:
        """Make an outer step if (k+1) mod ``every`` is 0, where k is ``step``."""
        is_due = due(step, self.settings.every)
        self.guard.check(is_due)
        if is_due:
            self._outer_step(self.settings.partner(self.site.rank, self.site.size, step))
        self.guard.keep()

    def _outer_step(self, partner: int) -> None:
        rates = self.settings
        self._pack()
        own = [self.site.slice(part) for part in self.flat]
        pulls = [slow * rates.gamma for slow in self.slow]
        factor = self._factor(partner)
        for x, slow, pull in zip(own, self.slow, pulls, strict=True):
            x.sub_(slow).mul_(rates.lr * factor).add_(pull)
        self._average(own, partner)
        self.site.commit()
        self.window.close()
        for x, slow, delta, pull in zip(own, self.slow, self.momentum, pulls, strict=True):
            delta.mul_(rates.momentum).add_(x.sub_(pull))
            x.copy_(slow.add_(delta))
        self.site.gather(self.flat)
        pack(self.site.parameters.values(), self.views.values())

    def _factor(self, partner: int) -> float:
        """Return 2 W_i/(W_i + W_j) of the samples of a pair's steps; 1 if they are equal."""
        site, mine = self.site, self.window.samples
        if site.weights is None:
            return 1.0
        mine = sum(samples for (samples,) in gather_numbers([mine], site.inside))
        if site.group is None or partner == site.rank:
            return 1.0
        sent = torch.tensor([mine], dtype=torch.float64, device=site.device)
        arrived = torch.zeros_like(sent)
        exchange([(partner, sent)], [(partner, arrived)], site.group).wait()
        total = mine + float(arrived)
        return 2 * mine / total if total else 1.0

    def _average(self, messages: list[Tensor], partner: int) -> None:
        """Replace messages by the mean with the partner's: both add the same two numbers."""
        if self.site.group is None or partner == self.site.rank:
            return
        theirs = [torch.empty_like(part) for part in messages]
        sends, receives = ([(partner, part) for part in parts] for parts in (messages, theirs))
        exchange(sends, receives, self.site.group).wait()
        for part, arrived in zip(messages, theirs, strict=True):
            part.add_(arrived).div_(2)

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters, with what their rounding has taken, and weight 1."""
        self.guard.require()
        self._pack()
        return self.flat, self.views, 1.0

    def windows(self) -> list[Window]:
        """Return the window since the last exchange, for each flat tensor."""
        return [self.window] * len(self.flat)

    def reset(self) -> None:
        """Start anew from equal replicas: slow weights = parameters, no momentum."""
        pack(self.views.values(), self.site.parameters.values())
        pack(self.slow, [self.site.slice(part) for part in self.flat])
        for momentum in self.momentum:
            momentum.zero_()
        self.window.close()
        self.guard.keep()

    def staleness(self, step: int) -> int:
        """Return the number of steps since the last exchange."""
        return step % self.settings.every

    def measures(self) -> dict[str, float]:
        """Return the number of steps that this rank has skipped, with "skip"."""
        return self.guard.measures()

    def _pack(self) -> None:
        """Copy the parameters, with what their rounding has taken in this rank's slice."""
        pack(self.views.values(), self.site.parameters.values())
        for part, slow, dtype in zip(self.flat, self.slow, self.layout.dtypes, strict=True):
            if dtype != slow.dtype:
                self.site.slice(part).add_(slow - slow.to(dtype))
