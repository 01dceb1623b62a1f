"""The start of a replica: all ranks connect, also one with a bad argument, and compare notes.

A rank that raised for itself would leave the others waiting for it.
"""

import json
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh

from offbeat.comm.links import Links
from offbeat.comm.process_group import default_group
from offbeat.comm.world import World, host_name
from offbeat.exchange import Algorithm
from offbeat.replica.connection import Connection


def connect(model: object, algorithm: object, mesh: object) -> Connection:
    """Connect to all other ranks, which all call; raise the same ``ValueError`` on all of them.

    The arguments are those of :func:`offbeat.replicate`. The layout of the ranks is ``mesh``, or
    made of the hosts that the ranks name.
    """
    given, fault = None, _argument_fault(model, algorithm)
    try:
        given = given_world(mesh)
    except ValueError as error:
        fault = fault or str(error)
    try:
        world = given or World.of([range(default_group().size())])
    except ValueError as error:  # there is nobody to tell
        raise ValueError(fault or str(error)) from None
    if world.size == 1:
        if fault is not None:
            raise ValueError(fault)
        return Connection(world, None, None)
    links = Links.connect(world)
    try:
        nodes = None if given is None else given.nodes
        word = json.dumps({"fault": fault, "nodes": nodes, "host": host_name()})
        said = [json.loads(other) for other in links.roll_call(word)]
        _require_no_fault(said, world.ranks)
        links.world = given or World.on_hosts([other["host"] for other in said])
    except BaseException:
        links.close()
        raise
    return Connection.over(links.world, links)


def given_world(mesh: object) -> World | None:
    """Return the layout that ``mesh`` describes; None if there is none, to be discovered."""
    if mesh is None or isinstance(mesh, World):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return World.from_mesh(mesh)
    raise ValueError(
        f"mesh={mesh!r}, expected a DeviceMesh with the axes ('node', 'local') or offbeat.World"
    )


def _argument_fault(model: object, algorithm: object) -> str | None:
    if not isinstance(model, nn.Module):
        return f"the model is a {type(model).__name__}, expected a torch.nn.Module"
    if not isinstance(algorithm, Algorithm):
        return (
            f"the algorithm is {algorithm!r}, expected what a recipe returns, for example "
            "offbeat.sgp() or offbeat.algorithm('sgp')"
        )
    return None


def _require_no_fault(said: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    for rank, word in zip(ranks, said, strict=True):
        if word["fault"] is not None:
            raise ValueError(f"rank {rank}: {word['fault']}")
    for rank, word in zip(ranks, said, strict=True):
        if (word["nodes"] is None) != (said[0]["nodes"] is None):
            raise ValueError(
                f"ranks {ranks[0]} and {rank} differ: the mesh has the nodes {said[0]['nodes']} "
                f"here and {word['nodes']} there; pass the same mesh on every rank, or on none"
            )
