"""The error of an update that is not finite, equal on all ranks."""

from collections.abc import Sequence

import torch

from offbeat.exchange import Site
from offbeat.exchange.guard import error_of_second_skip, error_of_step
from offbeat.methods.adasum.reduction import Statistics
from offbeat.transport.collectives import broadcast
from offbeat.transport.small_gathers import gather_numbers


def error_of_updates(
    site: Site, statistics: Statistics, names: Sequence[str], own: int | None, again: bool
) -> tuple[ValueError, bool]:
    """Return the error of a parameter that is not finite, and whether its rank is so again.

    ``own``: the first on this rank, which is so ``again``. A rank that is so again comes first.
    """
    node = site.inside or site.shards
    found = torch.tensor([-1, 0, -1 if own is None else own, again], device=site.device)
    # Those inside first: where a node's ranks share the layers, or hold shards of them, only one
    # of them has the value.
    for group in (node, site.group):
        if group is not None:
            everyone = gather_numbers(found.tolist(), group)
            bad = [member for member, (_, _, layer, _) in enumerate(everyone) if layer >= 0]
            if bad:
                member = max(bad, key=lambda member: everyone[member][3])  # the first of equals
                _, local, *what = map(int, everyone[member])
                place = (-1, member) if group is node else (member, local)
                found = torch.tensor([*place, *what], device=site.device)
    if node is not None:
        broadcast(found, 0, node).wait()
    participant, local, layer, again = found.tolist()
    if layer < 0:
        name = names[statistics.first_nonfinite()]
        fault = f"the updates of parameter {name!r} are too large to be combined"
        return ValueError(f"{fault}; lower the learning rate, or clip gradients"), False
    nodes, ranks = site.world.nodes, site.world.ranks
    rank = nodes[participant][local] if site.axis == "node" else ranks[participant]
    kind = error_of_second_skip if again else error_of_step
    return kind(f"rank {rank}", names[layer]), bool(again)
