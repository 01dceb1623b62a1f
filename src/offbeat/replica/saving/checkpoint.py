"""The state that a replica saves on each rank, and the continuation of a run from it."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.attach.first_step import keeps_equal
from offbeat.elastic.generation import Generation
from offbeat.exchange import BoundGradients, BoundParameters, Exchanged, Saved
from offbeat.exchange.sharding import local
from offbeat.functional import pack
from offbeat.liveness.failure import PeerLost
from offbeat.recipes.composed import compose
from offbeat.replica.saving import registered
from offbeat.replica.saving.checksum import checksum
from offbeat.replica.saving.entries import (
    NODES,
    REGISTERED,
    SUM,
    choose,
    entries_of,
    key_of,
    nodes_of,
    own_key,
    places_of,
    ranks_of,
)
from offbeat.replica.saving.structure import require_finite, require_same_structure
from offbeat.transport.small_gathers import gather_bytes, raise_alike
from offbeat.transport.world import World


class Resume(NamedTuple):
    """What a saved state amounts to on this rank; ``None`` for a slot that starts anew."""

    entry: Saved
    gradients: Saved | None
    parameters: Saved | None


def _kept(model: Exchanged, ranks_differ: bool) -> dict[str, Tensor]:
    """Return persistent buffers and what is ignored, and parameters where ranks may differ."""
    persistent, own = model.module.state_dict(keep_vars=True), model.buffers | model.ignored
    kept = {name: local(tensor) for name, tensor in own.items() if name in persistent}
    return kept | model.held if ranks_differ else kept


def save(members: Generation, step: int, is_averaged: bool, own: Mapping[str, Tensor]) -> Saved:
    """Return ``{"rank<r>": entry}`` of copies; ``own``: tensors where the model shows others."""
    key, ranks_differ = key_of(members.world), not keeps_equal(members.algorithm)
    kept = _kept(members.filler.model, ranks_differ)
    tensors = {name: own.get(name, tensor) for name, tensor in kept.items()}
    entry = {
        "size": members.world.size,
        "step": step,
        "settled": is_averaged,
        "ranks_differ": ranks_differ,
        "algorithm": repr(members.algorithm),
        NODES: nodes_of(members.world),
        "gradients": members.gradients.save(),
        "parameters": members.parameters.save(),
        "model": {name: tensor.detach().clone() for name, tensor in tensors.items()},
    }
    texts = registered.texts_of(members)
    entry |= {REGISTERED: texts} if texts else {}
    return {key: entry | {SUM: checksum({key: entry})}}


def fault_in_node(members: Generation, saved: Saved) -> str | None:
    """Return why a rank of this node cannot load its state; None without nodes. All of them call.

    Before :func:`check`, in which the first of them speaks for all to the other nodes.
    """
    node = members.node
    return None if node is None else node.first_fault(_try_read(members, saved)[1])


def check(members: Generation, saved: Saved, fault: str | None, *, stays: bool = False) -> Resume:
    """Return what a saved state amounts to; if that of any rank is unfit, all raise ValueError.

    ``fault``: that of another rank of this node. ``stays``: registered objects keep their states.
    """
    found, own = _try_read(members, saved)
    raise_alike(fault or own, members.connection.control)
    assert found is not None, "a fault was raised"
    _require_one_moment(members, found)
    registered.load(members, found.entry.get(REGISTERED, {}), stays)
    return found


def load(members: Generation, saved: Saved, fault: str | None) -> tuple[int, bool]:
    """Restore a saved state and return its step, and whether all replicas were equal then."""
    found = check(members, saved, fault, stays=True)
    entry = found.entry
    # Nothing below may fail: another rank may have written its parameters already.
    own = _kept(members.filler.model, entry["ranks_differ"])
    with torch.no_grad():
        pack(own.values(), [entry["model"][name] for name in own])
        if found.gradients is not None or members.gradients.site is None:
            members.gradients.load(found.gradients or {})
        if found.parameters is not None:
            members.parameters.load(found.parameters)
        else:
            members.parameters.reset()  # equal replicas start anew, whatever this one did before
    return entry["step"], entry["settled"]


def _try_read(members: Generation, saved: Saved) -> tuple[Resume | None, str | None]:
    """Return what a saved state amounts to, or why it is unfit."""
    try:
        return _read(members, saved), None
    except PeerLost:
        raise
    except Exception as error:  # whatever a state of any origin makes fail, all ranks must hear of
        reason = error if isinstance(error, ValueError) else f"cannot load this state: {error!r}"
        return None, str(reason).encode(errors="backslashreplace").decode()


def _read(members: Generation, saved: object) -> Resume:
    """Return what this rank resumes from; raise ``ValueError`` if there is nothing."""
    # Waits for what is in flight, since slots show their own state for comparison: a loss is found
    # here, before anything is written.
    used = choose(members, entries_of(saved))
    entry = next(iter(used.values()))
    for key, other in used.items():
        content = {name: value for name, value in other.items() if name != SUM}
        if SUM in other and other[SUM] != checksum({key: content}):
            raise ValueError(
                f"the state {key!r} is not what was saved: its checksum is wrong; the file was "
                "damaged, its values were changed or cast since, or a distributed checkpoint was "
                "read before the samplers were made; make them first, or load another checkpoint"
            )
    saved_by = re.sub(r"on_failure='\w+', ", "", entry["algorithm"])  # of push-sum until 0.2
    same = saved_by == repr(members.algorithm)
    if not same and not entry["settled"]:
        raise ValueError(
            f"found the state of {_short(saved_by)}, but this replica runs "
            f"{members.algorithm}; call finish() before saving to change the algorithm"
        )
    if same and entry["ranks_differ"] == keeps_equal(members.algorithm):
        raise ValueError(
            f"'ranks_differ' is {entry['ranks_differ']} in a state of {members.algorithm}"
        )
    _require_fitting_model(members, entry)
    has_mates = members.gradients.site is not None
    gradients = _inherit(members, used, entry) if same and has_mates else None
    return Resume(entry, gradients, _continued(members, entry) if same else None)


def algorithm_of(saved: object, world: World) -> str:
    """Return the algorithm that a state of any origin names; "" if it names none."""
    entries = saved if isinstance(saved, dict) else {}
    entry = entries.get(f"rank{world.rank}") or next(iter(entries.values()), None)
    return str(entry.get("algorithm")) if isinstance(entry, dict) else ""


def _short(text: str) -> str:
    """Return the exchanges of a saved algorithm without the settings that are defaults."""
    try:
        return str(compose(text))
    except ValueError:  # a function among its settings has no text
        return text


def _require_fitting_model(members: Generation, entry: Saved) -> None:
    expected = _kept(members.filler.model, entry["ranks_differ"])
    require_same_structure(expected, entry["model"], "state['model']")
    trained = {name for name, tensor in expected.items() if tensor.requires_grad}
    # Buffers may hold what they like: masks are often infinite.
    require_finite({name: entry["model"][name] for name in trained}, "state['model']")


def _inherit(members: Generation, used: Mapping[str, Saved], entry: Saved) -> Saved | None:
    """Return the state for the gradients slot: of its own rank, merged from several, or None."""
    slot, world = members.gradients, members.world
    before, place = ranks_of(entry), (world.ranks.index(world.rank), world.size)
    if members.filler.model.is_sharded:  # only the ranks that held this shard, one of each node
        shard = world.local_rank
        before = [node[shard] for node in entry[NODES] if shard < len(node)]
        place = world.node, len(world.nodes)
    own, saved = slot.save(), {}
    for index, rank in enumerate(before):
        if f"rank{rank}" in used:
            saved[index] = used[f"rank{rank}"]["gradients"]
            _require_fitting_slot(slot, own, saved[index], f"rank{rank}['gradients']")
    if (mine := used.get(own_key(world, used))) is not None:
        return dict(mine["gradients"])
    assert members.algorithm.gradients is not None, "the slot is in use"
    return members.algorithm.gradients.inherit(saved, len(before), *place)


def _continued(members: Generation, entry: Saved) -> Saved | None:
    """Return the state for the parameters slot; None where it starts anew from the models."""
    if entry["size"] != members.world.size:  # ranks were equal then, or are the survivors of a loss
        return None
    nodes = nodes_of(members.world)
    site = members.parameters.site
    before = places_of(entry.get(NODES, nodes))
    if site is not None and site.axis == "node" and before != places_of(nodes):
        if entry["settled"]:
            return None
        raise ValueError(
            f"found the state of the nodes {ascii(entry[NODES])[:60]}, but these are {nodes}; "
            "start on the same nodes, or call finish() before saving"
        )
    slot, saved = members.parameters, entry["parameters"]
    _require_fitting_slot(slot, slot.save(), saved, "state['parameters']")
    return dict(saved)


def _require_fitting_slot(
    slot: BoundGradients | BoundParameters, own: Saved, saved: Saved, path: str
) -> None:
    require_same_structure(own, saved, path)
    require_finite(saved, path)
    fault = slot.unfit(saved)
    if fault is not None:
        raise ValueError(f"{path} cannot be loaded: {fault}")


def _require_one_moment(members: Generation, found: Resume) -> None:
    """Raise the same ValueError on all ranks unless they resume from one moment of one run."""
    if (control := members.connection.control) is None:
        return
    facts: Saved = {name: found.entry[name] for name in ("step", "size", "settled", "algorithm")}
    # Groups of ranks measure an order of their own: those of a node, or of a shard.
    site = members.gradients.site
    gathers_inside = site is not None and site.axis == "local"
    place = f" on node {members.world.node}" if gathers_inside else ""
    place = f" of shard {members.world.local_rank}" if members.filler.model.is_sharded else place
    for where, slot, state in (
        (f"gradients{place}", members.gradients, found.gradients),
        ("parameters", members.parameters, found.parameters),
    ):
        shared = slot.shared(state) if state is not None else {}
        facts |= {f"{name} of the {where}": checksum(value) for name, value in shared.items()}
    everyone = [json.loads(other) for other in gather_bytes(json.dumps(facts).encode(), control)]
    steps = [other["step"] for other in everyone]
    if len(set(steps)) > 1:
        raise ValueError(
            f"the loaded states are of different numbers of steps: {steps} by rank; load what all "
            "ranks saved after the same step"
        )
    first: dict[str, tuple[int, object]] = {}
    for rank, other in zip(control.ranks, everyone, strict=True):
        for what, value in other.items():
            reference, expected = first.setdefault(what, (rank, value))
            if value != expected:
                raise ValueError(
                    f"ranks {reference} and {rank} load states of different runs: they differ in "
                    f"the {what}; load what all ranks saved at the same time"
                )
