"""Recipes with an outer optimizer, for nodes that exchange once in many steps."""

from typing import Annotated, Literal

from offbeat.exchange import Algorithm
from offbeat.exchange.guard import Nonfinite
from offbeat.methods import OuterGossip, OuterStep, Sparse
from offbeat.recipes.recipe import Within, levels, recipe
from offbeat.settings import at_least, between, check_values

Rate = Annotated[float, at_least(0)]


@recipe
def diloco(
    every: int = 100,
    *,
    lr: Rate = 0.7,
    momentum: Annotated[float, between(0, 1, closed="left")] = 0.9,
    nesterov: bool = True,
    fragments: int = 1,
    delay: int = 0,
    mixing: float | None = None,
    wire: Literal["bf16", "int8"] | None = None,
    within: Within = None,
) -> Algorithm:
    """Train independently, and step the mean by SGD with momentum (DiLoCo, Streaming DiLoCo).

    ``lr``, ``momentum`` and ``nesterov`` are those of the outer ``torch.optim.SGD``. See
    :class:`offbeat.methods.OuterStep`.

    >>> diloco(every=50).parameters.outer
    'SGD(lr=0.7, momentum=0.9, nesterov=True)'
    """
    check_values(diloco, {"lr": lr, "momentum": momentum, "nesterov": nesterov})
    if nesterov and not momentum:
        raise ValueError(
            "momentum=0 with nesterov=True: there is none to look ahead; use nesterov=False"
        )
    inside, over = levels(within)
    outer_step = OuterStep(
        every=every,
        outer=f"SGD(lr={lr!r}, momentum={momentum!r}, nesterov={nesterov!r})",
        fragments=fragments,
        delay=delay,
        mixing=mixing,
        wire=wire,
        over=over,
    )
    return Algorithm(inside, outer_step)


@recipe
def sparse_loco(
    every: int = 30,
    *,
    density: float = 1 / 64,
    decay: float = 0.95,
    bits: Literal[2, 4, 8] | None = 2,
    lr: Rate = 1.0,
    fragments: int = 1,
    delay: int = 0,
    within: Within = None,
) -> Algorithm:
    """Train independently, and exchange the largest changes of the parameters (SparseLoCo).

    ``lr`` is the rate of the outer SGD. With a ``delay`` the steps made meanwhile are discarded.
    See :class:`offbeat.methods.Sparse` and :class:`offbeat.methods.OuterStep`.

    >>> sparse_loco(every=50).parameters.wire
    Sparse(density=0.015625, decay=0.95, bits=2)
    """
    check_values(sparse_loco, {"lr": lr})
    inside, over = levels(within)
    outer_step = OuterStep(
        every=every,
        outer=f"SGD(lr={lr!r})",
        fragments=fragments,
        delay=delay,
        wire=Sparse(density=density, decay=decay, bits=bits),
        over=over,
    )
    return Algorithm(inside, outer_step)


@recipe
def noloco(
    every: int = 50,
    *,
    lr: Rate = 0.7,
    momentum: float = 0.5,
    gossip_lr: float | None = None,
    seed: int = 0,
    within: Within = None,
    nonfinite: Nonfinite = "raise",
) -> Algorithm:
    """Train independently, and make outer steps in random pairs, without an all-reduce (NoLoCo).

    See :class:`offbeat.methods.OuterGossip`.

    >>> noloco(every=100).parameters.momentum
    0.5
    """
    inside, over = levels(within)
    gossip = OuterGossip(
        every=every,
        lr=lr,
        momentum=momentum,
        gossip_lr=gossip_lr,
        seed=seed,
        over=over,
        nonfinite=nonfinite,
    )
    return Algorithm(inside, gossip)
