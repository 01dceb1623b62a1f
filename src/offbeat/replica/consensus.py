"""The average model of all replicas."""

import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim.swa_utils import update_bn

from offbeat.attach.first_step import keeps_equal
from offbeat.elastic.generation import Generation
from offbeat.exchange import BoundParameters, Exchanged
from offbeat.exchange.sharding import local
from offbeat.functional import distances_to_mean, pack, sketch
from offbeat.platform.privates import BatchNorm
from offbeat.platform.round_trip import FAR, round_trip
from offbeat.transport.collectives import all_reduce, all_reduce_at_once, broadcast
from offbeat.transport.group import Group, message_device
from offbeat.transport.small_gathers import gather_bytes, gather_numbers, gather_rows

PIECE = 2**20  # elements averaged at a time: bounds the float64 copy to 8 MiB


@final
class Consensus:
    """Shows the average of all replicas in place of this rank's own values, or sets it for good."""

    def __init__(self, members: Generation) -> None:
        """Show the own values at first."""
        self.model, self._members = members.filler.model, members
        self._held = {name: local(parameter) for name, parameter in self.model.trained.items()}
        self._replaced: dict[str, Tensor] = {}
        self._modes: list[tuple[dict[str, Any], bool]] = []
        self.own: dict[str, Tensor] = {}  # copies by name, while the model shows the average
        # Likewise, while :meth:`set` may be repeated, and what its windows have covered.
        self._before, self._covered = dict[str, Tensor](), list[float]()

    def show(self, steps: int) -> None:
        """Show the average, or the own values if that fails; all ranks call."""
        if self.own:
            self.hide()  # a first try has failed after its end
        self._replaced = self._held | self.model.buffers
        self.own = {name: tensor.detach().clone() for name, tensor in self._replaced.items()}
        optimizers = self._members.filler.optimizers
        places = [place for o in optimizers for place in (vars(o), *o.param_groups)]
        # Where schedule-free optimizers note which of their two sequences the parameters hold.
        self._modes = [(place, place["train_mode"]) for place in places if "train_mode" in place]
        try:
            self.reach("consensus", steps)
        except BaseException:
            self.hide()
            raise

    def hide(self) -> None:
        """Write the own values back."""
        self.model.reshard()
        pack(self._replaced.values(), self.own.values())
        for place, mode in self._modes:
            place["train_mode"] = mode
        self._replaced, self.own, self._modes = {}, {}, []

    def set(
        self, verb: str, steps: int, also: Mapping[str, Tensor] | None = None, **more: Any
    ) -> "Compared":
        """As :meth:`reach`, for good; repeated after a loss it begins with the same values.

        Some ranks may have reached an average by then, of which those that are lost are a part.
        ``also``: what the caller averages too.
        """
        slot = self._members.parameters
        held = {**self.model.buffers, **(also or {})}
        held |= self._held if slot.site is not None or self._before else {}
        if self._before:
            pack([held[name] for name in self._before], self._before.values())
            # The last rank that is left has no windows.
            for window, covered in zip(slot.windows(), self._covered, strict=False):
                window.covered = covered
        elif self._members.filler.is_elastic:
            self._before = {name: tensor.detach().clone() for name, tensor in held.items()}
            self._covered = [window.covered for window in slot.windows()]
        return self.reach(verb, steps, **more)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Note at the end of the block that all ranks have made the call, or none will."""
        try:
            yield
        finally:
            self._before = {}

    def reach(
        self,
        verb: str,
        steps: int,
        *,
        exact: bool = True,
        known: "Compared | None" = None,
        are_equal: bool = False,
    ) -> "Compared":
        """Set parameters and buffers to the average, after ``steps`` on all ranks; all call.

        ``exact``: as in :func:`average_parameters`. ``known``: what ranks have compared just now;
        returns what they know at the end. ``are_equal``: whether all parameters are.
        """
        control = self._members.connection.control
        known = known or compared(self.model, verb, control, steps)
        with torch.no_grad():
            if not are_equal:
                average_parameters(self._members.parameters, exact=exact, is_far=known.is_far)
            average_buffers([*known.buffers.values()], control, is_far=known.is_far)
        return known

    def measured(
        self, loader: Iterable[Any], device: torch.device | None, is_one_model: bool
    ) -> Callable[[], None]:
        """Compute BatchNorm statistics on this rank's batches; return what averages them."""
        if not (is_one_model or self.own):
            raise ValueError(
                "update_bn() was called where ranks hold different models; call it inside "
                "consensus(), on their average, or after finish()"
            )
        model = self.model.module
        modes = {module: module.training for module in model.modules()}
        count = itertools.count()
        update_bn((batch for batch, _ in zip(loader, count, strict=False)), model, device)
        for module, mode in modes.items():
            module.training = mode  # torch gives frozen layers the mode of the model
        batches = next(count)
        own = {name: buffer.clone() for name, buffer in self.model.buffers.items()}

        def average() -> None:
            control = self._members.connection.control
            total = sum(n for (n,) in gather_numbers([batches], control))
            if not total and any(isinstance(module, BatchNorm) for module in modes):
                raise ValueError("update_bn() got no batches; pass a loader that has some")
            buffers, is_far = compared(self.model, "update_bn", control)
            pack(buffers.values(), (own[name] for name in buffers))  # a first try may have failed
            among = control if total else None
            average_buffers([*buffers.values()], among, batches, is_far=is_far)

        return average

    def distance(self) -> dict[str, float]:
        """Return the distance of the replicas from their average; all ranks call."""
        control, site = self._members.connection.control, self._members.parameters.site
        if not self.model.is_sharded or site is None:
            return consensus_distance(self._held, control)
        return consensus_distance(site.parameters, control, self._members.world.nodes)

    def drift(self) -> tuple[dict[str, float], str | None]:
        """Return the distance, and a warning if the algorithm keeps replicas equal; all call."""
        distance, algorithm = self.distance(), self._members.algorithm
        if not keeps_equal(algorithm) or not distance["max"] > 0:
            return distance, None
        return distance, (
            f"finish() found replicas at distances up to {distance['max']:.3g} from their average, "
            f"and {algorithm} keeps them equal: did a rank load another optimizer state, or miss a "
            "step?"
        )


class Compared(NamedTuple):
    """What ranks know of each other: the buffers that all have, and whether some are far away."""

    buffers: dict[str, Tensor]
    is_far: bool = False


def average_parameters(slot: BoundParameters, *, exact: bool = True, is_far: bool = False) -> None:
    r"""Set the parameters to the weighted average of all participants.

    .. math:: \bar z = \sum_i x_i \Big/ \sum_i w_i

    Numerators x include what is in flight. If ``exact``, sums run in float64, so that averaging
    equal replicas changes nothing, bit for bit; else in float32, or wider parameters' dtype. Bytes
    sent: 4 (n-1)/n of the model's, or half; ``is_far``: to all at once. In a run with weights
    participants count by the samples of their steps since the last exchange.
    """
    site = slot.site
    if site is None:
        return
    flat, views, weight = slot.mass()
    factors, windows = [1.0] * len(flat), slot.windows() if site.weights is not None else ()
    for index, window in enumerate(windows):
        window.weigh(is_average=True)
        factors[index] = site.factor
    if site.group is not None:
        for part, factor in zip(flat, factors, strict=True):
            mine = site.slice(part)
            _average(mine, site.group, factor, weight, exact=exact, is_far=is_far)
    site.gather(flat)
    pack(site.parameters.values(), views.values())
    site.copy_replicated()


def average_buffers(
    buffers: Sequence[Tensor], group: Group | None, weight: float = 1.0, *, is_far: bool = False
) -> None:
    """Average float buffers over all ranks, weighted; copy other buffers from the first rank."""
    if group is None:
        return
    for like in _alike([buffer.detach() for buffer in buffers], group):
        message = torch.cat([b.reshape(-1).to(message_device(group, b.device)) for b in like])
        if message.is_floating_point():
            _average(message, group, weight, weight, is_far=is_far)
        else:
            broadcast(message, 0, group).wait()
        parts = message.split([buffer.numel() for buffer in like])
        for buffer, part in zip(like, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


def _alike(buffers: Iterable[Tensor], group: Group) -> Iterator[list[Tensor]]:
    """Yield buffers that fit into one message: far away every message takes a round trip."""
    waiting = defaultdict[tuple[torch.dtype, torch.device], list[Tensor]](list)
    for buffer in buffers:
        like = waiting[buffer.dtype, message_device(group, buffer.device)]
        if like and sum(b.numel() for b in like) + buffer.numel() > PIECE:
            yield [*like]
            like.clear()
        like.append(buffer)
    yield from waiting.values()


def compared(model: Exchanged, verb: str, group: Group | None, steps: int = 0) -> Compared:
    """Return the buffers that all ranks have alike; raise ValueError on all ranks if one is missed.

    Also if they have made different numbers of ``steps``.

    Buffers may be added and removed after ``replicate``, on all ranks. Those that are not
    persistent are caches, for instance of the longest sequence that a rank has seen: where they
    differ in presence, shape or dtype, each rank keeps its own.
    """
    buffers = model.buffers
    if group is None:
        return Compared(buffers)
    mine = kinds_of_buffers(model)
    rows = gather_numbers([steps, zlib.crc32(mine.encode()), round_trip()], group)
    is_far = max(trip for _, _, trip in rows) >= FAR
    if len(set(made := [int(steps) for steps, _, _ in rows])) > 1:
        raise ValueError(
            f"{verb}() was called after different numbers of steps: {made} by rank; call "
            "step() equally often on all ranks"
        )
    if len({crc for _, crc, _ in rows}) == 1:
        return Compared(buffers, is_far)
    everyone = [json.loads(their) for their in gather_bytes(mine.encode(), group)]
    caches = set()
    for rank, other in zip(group.ranks, everyone, strict=True):
        for name in {**everyone[0], **other}:
            here, here_stays = everyone[0].get(name, ("missing", False))
            there, there_stays = other.get(name, ("missing", False))
            if here == there:
                continue
            if here_stays or there_stays:
                raise ValueError(
                    f"{verb}() found different buffers: {name!r} is {here} on rank "
                    f"{group.ranks[0]} and {there} on rank {rank}; give all ranks the same"
                )
            caches.add(name)
    shared = {name: buffers[name] for name in everyone[0] if name not in caches}
    return Compared(shared, is_far)


def kinds_of_buffers(model: Exchanged) -> str:
    """Return the name, shape, dtype and persistence of all buffers, as JSON."""
    persistent = model.module.state_dict(keep_vars=True)
    kinds = {
        name: [[list(buffer.shape), str(buffer.dtype)], name in persistent]
        for name, buffer in model.buffers.items()
    }
    return json.dumps(kinds)


def consensus_distance(
    parameters: Mapping[str, Tensor],
    group: Group | None,
    nodes: Sequence[Sequence[int]] | None = None,
) -> dict[str, float]:
    """Return the mean and maximum L2 distance of the replicas' parameters to their average.

    ``nodes``: the ranks of each node, which hold the shards of one replica; by default each rank
    is a replica. Read from 32 KiB sketches, one all-gather: exactly 0 for equal replicas, otherwise
    with a standard error of about 1.1 % (see :func:`offbeat.functional.sketch`).
    """
    if group is None:
        return {"mean": 0.0, "max": 0.0}
    replicas = nodes or [[rank] for rank in group.ranks]
    mine = group.ranks[group.rank]
    shard = next(ranks.index(mine) for ranks in replicas if mine in ranks)
    first = shard * len(parameters)  # shards of one tensor need signs of their own
    total = sum(sketch(p.reshape(-1), first + i) for i, p in enumerate(parameters.values()))
    assert isinstance(total, Tensor), "a replica has parameters"
    row_of = dict(zip(group.ranks, gather_rows(total, group), strict=True))
    # The sketch of a model is the sum of those of its shards.
    models = torch.stack([torch.stack([row_of[r] for r in ranks]).sum(0) for ranks in replicas])
    mean, largest = distances_to_mean(models)
    return {"mean": mean, "max": largest}


def _average(
    flat: Tensor,
    group: Group,
    factor: float,
    weight: float,
    *,
    exact: bool = True,
    is_far: bool = False,
) -> None:
    """Set ``flat`` to the sum over all ranks of what it is ``factor`` times, by their weights'."""
    dtype = torch.float64 if exact or flat.dtype == torch.float64 else torch.float32
    for piece in flat.split(PIECE) if flat.numel() > 0 else ():
        wide = torch.empty(piece.numel() + 1, dtype=dtype, device=piece.device)
        wide[:-1].copy_(piece).mul_(factor)
        wide[-1] = weight
        if is_far:
            all_reduce_at_once(wide, group)
        else:
            all_reduce(wide, group).wait()
        piece.copy_(wide[:-1].div_(wide[-1]))
