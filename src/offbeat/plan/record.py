"""Records what one rank of a world does under an algorithm, without the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from offbeat.attach.slots import SlotFiller
from offbeat.exchange import Algorithm, Exchanged, ParameterExchange, Site
from offbeat.plan.fabric import Fabric
from offbeat.plan.profile import Profile
from offbeat.platform.process_group import thread_store
from offbeat.transport.recorded import Event, RecordedLinks, WithoutValues
from offbeat.transport.world import Axis, World


@final
@dataclass(frozen=True)
class Recording:
    """What one rank did.

    Attributes:
        steps: the events of each step.
        first: how many launches there were before each step, and before the end.
        sent: bytes that it sent in each step, by axis.
        memory: bytes that the exchanges hold at the end.
    """

    steps: Sequence[Sequence[Event]]
    first: Sequence[int]
    sent: Sequence[Mapping[str, int]]
    memory: int


def record(
    algorithm: Algorithm,
    parameters: Mapping[str, Tensor],
    nodes: Sequence[Sequence[int]],
    steps: int,
    rank: int = 0,
    order: Sequence[str] | None = None,
) -> Recording:
    """Run ``steps`` steps of ``algorithm`` as ``rank``, over recorded groups.

    ``parameters`` may be on the device "meta". Gradients become ready in ``order``, by default that
    of backward: from the last parameter to the first.

    >>> import offbeat
    >>> model = {"w": torch.empty(10**9, device="meta")}
    >>> record(offbeat.ddp(), model, [[rank] for rank in range(4096)], steps=1).sent[0]
    {'world': 7998046898}
    """
    links = RecordedLinks(World(rank, tuple(map(tuple, nodes)), thread_store(), None))
    model = _Model(parameters)
    filler = SlotFiller(algorithm, Exchanged(model), (), None, [])
    found: list[Sequence[Event]] = []
    first: list[int] = []
    sent: list[Mapping[str, int]] = []
    with WithoutValues(links):
        control = links.open("world")
        shared = filler.parameters(links, control)
        gradients = filler.gradients(links, control)
        for step in range(steps):
            links.events, links.meter.bytes_sent = [], {}
            first.append(links.launches)
            if not gradients.is_empty:
                for name in order or [*reversed(model.names)]:
                    parameter = gradients.site.registered[name]
                    parameter.grad = torch.zeros_like(parameter)
                    gradients.ready(name)
                gradients.finish()
                gradients.stepped()
            shared.report(1 / (step + 1))  # of a healthy run: no plateau
            with torch.no_grad():
                shared.step(step)
            found.append(links.events)
            sent.append(links.meter.bytes_sent)
        return Recording(
            found, [*first, links.launches], sent, gradients.nbytes() + shared.nbytes()
        )


def bound_in(exchange: ParameterExchange, profile: Profile, fabric: Fabric, rank: int = 0) -> Any:
    """Return ``exchange`` as it is bound on ``rank``, over recorded groups."""
    links = RecordedLinks(World(rank, fabric.layout, thread_store(), None))
    model = Exchanged(_Model(profile.tensors))
    with WithoutValues(links):
        control = links.open("world")
        site = Site.on(exchange.over, links, model, control=control, peers=exchange.peers)
        return exchange.bind(site)


def site_in(parameters: Mapping[str, Tensor], fabric: Fabric, over: Axis) -> Site:
    """Return the site of the first rank, without groups: for what an exchange decides by it."""
    world = World(0, fabric.layout, thread_store(), None)
    return Site(nn.Module(), parameters, parameters, world, over, None)


class _Model(nn.Module):
    """A model of given parameters, whose names may hold dots."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = list(parameters)
        for name, tensor in parameters.items():
            self._parameters[name] = nn.Parameter(tensor)
