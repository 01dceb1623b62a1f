"""The start of a replica: all ranks connect, also one with a bad argument, and compare notes.

A rank that raised for itself would leave the others waiting for it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import DeviceMesh

from offbeat.attach.checks import (
    difference,
    digest_of,
    fingerprint,
    gradients_fault,
    model_fault,
)
from offbeat.attach.connection import Connection
from offbeat.attach.slots import SlotFiller
from offbeat.exchange import Algorithm
from offbeat.exchange.sharding import has_one_axis
from offbeat.kit.warning import warn
from offbeat.platform.process_group import default_group, release_in_defaults
from offbeat.transport.links import Links, connections
from offbeat.transport.meter import Meter
from offbeat.transport.run import token
from offbeat.transport.world import World, host_name


def connect(
    filler: SlotFiller, mesh: object, run: int = 0, meter: Meter | None = None
) -> Connection:
    """Connect to all other ranks, which all call; raise the same ``ValueError`` on all of them.

    ``run``: the number of the run, if others may join it; ``meter``: counters of this rank.
    """
    given, fault = None, argument_fault(filler)
    try:
        given = given_world(mesh)
    except ValueError as error:
        fault = fault or str(error)
    try:
        world = given or World.of([range(default_group().size())])
    except ValueError as error:  # there is nobody to tell
        raise ValueError(fault or str(error)) from None
    world = world if fault else replace(world, connections=connections(filler.connections))
    fault = fault or model_fault(filler.model)
    if world.group is not None:
        release_in_defaults(world.group)
        fault = fault or token.fault_of_process_group()
    if world.size == 1 and not run:  # alone, the optimizer is not read
        if fault is not None:
            raise ValueError(fault)
        return Connection(world, None, None)
    fault = fault or algorithm_fault(filler)
    if filler.is_elastic and world.is_part:
        fault = fault or (
            "elastic=True with a mesh of some ranks only: the others, such as the next stage of a "
            "pipeline, would not hear of a loss; use elastic=False"
        )
    links = Links.connect(world, run, meter)
    try:
        hosts = _agree(links, fault, given, filler)
        nodes = world.nodes if given else World.on_hosts(hosts).nodes
        links.world = replace(world, nodes=nodes)
    except BaseException:
        links.end_run()
        links.close()
        raise
    return Connection(links.world, links, None).open()


def given_world(mesh: object) -> World | None:
    """Return the layout that ``mesh`` describes; None if there is none, to be discovered."""
    if mesh is None or isinstance(mesh, World):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return World.from_mesh(mesh)
    raise ValueError(
        f"mesh={mesh!r}, expected a DeviceMesh with the axes ('node', 'local') or offbeat.World"
    )


def argument_fault(filler: SlotFiller) -> str | None:
    """Return why it holds no arguments of :func:`offbeat.replicate`, or None."""
    model, algorithm = filler.model, filler.algorithm
    if not isinstance(model.module, nn.Module):
        return f"the model is a {type(model.module).__name__}, expected a torch.nn.Module"
    if not isinstance(algorithm, Algorithm):
        return (
            f"the algorithm is {algorithm!r}, expected what a recipe returns, for example "
            "offbeat.sgp() or offbeat.algorithm('sgp')"
        )
    try:
        connections(filler.connections)
    except ValueError as error:
        return str(error)
    return model.fault()


def algorithm_fault(filler: SlotFiller) -> str | None:
    """Return why this rank cannot run the algorithm, or None."""
    return gradients_fault(filler) or _elastic_fault(filler) or _weights_fault(filler)


def _elastic_fault(filler: SlotFiller) -> str | None:
    """Return why a run, if it is elastic, cannot go on without a lost rank, or None."""
    model, algorithm = filler.model, filler.algorithm
    if not filler.is_elastic:
        return None
    if model.is_sharded and not has_one_axis(model.parameters):
        return (
            "elastic=True with parameters of which several ranks of a node hold the same part, as "
            "under tensor parallelism: shard by FSDP2 alone, over one axis, or use elastic=False"
        )
    near, far = algorithm.gradients, algorithm.parameters
    if model.is_sharded and algorithm.then is not None:
        return (
            f"elastic=True with {algorithm} and a sharded model: in an elastic run of nodes the "
            "algorithm cannot change; use one recipe, or elastic=False"
        )
    ends_node = near is not None and near.over == "local" and not model.is_sharded
    if ends_node and (far is None or far.over == "world"):
        return (
            f"elastic=True with {algorithm}: a rank that is lost inside backward ends its node, "
            "so nodes must be what exchanges parameters; use a recipe with within='local', or "
            "elastic=False"
        )
    for exchange in (None if near is None or near.over == "local" else near, far):
        if exchange is not None and exchange.on_loss is None:
            return (
                f"elastic=True with {algorithm}: {exchange} cannot be made again without a lost "
                "rank; use a fixed density and measure=False in lags(), partition=False in "
                "adasum(), ddp() in place of torch_ddp(), or elastic=False"
            )
    return None


def _weights_fault(filler: SlotFiller) -> str | None:
    """Return why the ranks of a run that has weights cannot have them, or None."""
    algorithm, far = filler.algorithm, filler.algorithm.parameters
    if filler.samples is None:
        return None
    if filler.model.is_sharded:
        return "weighted=True with a sharded model: FSDP2 averages inside the node, all ranks alike"
    if filler.is_elastic and far is not None and far.over == "node":
        return (
            f"weighted=True with elastic=True and {algorithm}: nodes that come and go count alike; "
            "use within='world', elastic=False or weighted=False"
        )
    for exchange in (algorithm.gradients, far):
        if exchange is not None and not exchange.takes_weights:
            return (
                f"weighted=True with {algorithm}: {exchange} counts all ranks alike; use another "
                "recipe, such as ddp() or sgp() without biased=True, or weighted=False"
            )
    return None


def _agree(links: Links, fault: str | None, given: World | None, filler: SlotFiller) -> list[str]:
    """Return the hosts of all ranks; raise ``ValueError`` on all if one has a fault or differs."""
    nodes, ranks = None if given is None else given.nodes, links.world.ranks
    mine = {} if fault else fingerprint(filler, nodes)
    digest = digest_of(mine)
    word = {"fault": fault, "host": host_name(), "digest": digest, "torch": torch.__version__}
    text = links.roll_call(json.dumps(word), lambda words: _conclude(words, ranks))
    agreed = json.loads(text)
    fault = agreed["fault"]
    if agreed["unlike"] is not None:
        fault = _compare(links, agreed["unlike"], json.dumps(mine))
    if fault is not None:
        raise ValueError(fault)
    if agreed["note"] is not None and links.world.rank == ranks[0]:
        warn(agreed["note"])
    hosts: list[str] = agreed["hosts"]
    return hosts


def _conclude(words: Sequence[str], ranks: Sequence[int]) -> str:
    """Return as JSON a fault, a rank unlike the first, a warning, each or null, and all hosts."""
    said = [json.loads(word) for word in words]
    everyone = [*zip(ranks, said, strict=True)]
    faults = [f"rank {rank}: {word['fault']}" for rank, word in everyone if word["fault"]]
    unlike = [rank for rank, word in everyone if word["digest"] != said[0]["digest"]]
    builds = {word["torch"]: rank for rank, word in reversed(everyone)}
    found = ", ".join(f"{build} on rank {rank}" for build, rank in builds.items())
    note = f"the ranks run several builds of torch ({found}), whose results may differ by rounding"
    agreed = {
        "fault": faults[0] if faults else None,
        "unlike": unlike[0] if unlike and not faults else None,
        "note": note if len(builds) > 1 else None,
        "hosts": [word["host"] for word in said],
    }
    return json.dumps(agreed)


def _compare(links: Links, unlike: int, mine: str) -> str:
    """Return how the fingerprint of rank ``unlike`` differs from that of the first; all call."""
    first, rank = links.world.ranks[0], links.world.rank
    if rank == first:
        links.tell("fingerprint", mine)
    if rank == unlike:
        found = difference(json.loads(links.hear("fingerprint")), json.loads(mine))
        links.tell(
            "difference",
            f"ranks {first} and {rank} differ: {found}; use the same versions, model and algorithm "
            "on all ranks, and the same mesh or none",
        )
    return links.hear("difference")
