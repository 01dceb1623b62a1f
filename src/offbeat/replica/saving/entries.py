"""The entries of a saved state, one of each rank, and which of them goes on in which rank."""

import re
from collections.abc import Iterable, Mapping

from offbeat.elastic.generation import Generation
from offbeat.exchange import Saved
from offbeat.replica.saving.structure import require_same_structure
from offbeat.transport.world import World

HEAD: Saved = {"size": 1, "step": 0, "settled": True, "ranks_differ": True, "algorithm": ""}
PARTS = "gradients", "parameters", "model"
SUM, NODES, REGISTERED = "checksum", "nodes", "registered"
LATER = {SUM, NODES, REGISTERED}  # a state without them was saved by an earlier version


def key_of(world: World) -> str:
    """Return the name of a rank's entry: tools keep one copy of values with equal names."""
    return f"rank{world.rank}"


def entries_of(saved: object) -> dict[str, Saved]:
    """Return the entries of all ranks in ``saved``, each with all its parts."""
    entries = {
        key: entry
        for key, entry in (saved.items() if isinstance(saved, dict) else ())
        if isinstance(key, str) and re.fullmatch(r"rank\d+", key)
    }
    if not entries:
        raise ValueError(
            f"cannot load {ascii(saved)[:60]}; pass what state_dict() returned after a step()"
        )
    for key, entry in entries.items():
        if not isinstance(entry, dict) or {*entry} - LATER != {*HEAD, *PARTS}:
            raise ValueError(
                f"cannot load {ascii(entry)[:60]} as {key!r}; pass what state_dict() returned "
                "after a step()"
            )
        require_same_structure(HEAD, {name: entry[name] for name in HEAD}, key)
        for part in PARTS:
            if not isinstance(entry[part], dict):
                raise ValueError(f"{key}[{part!r}] is {ascii(entry[part])[:40]}, expected a dict")
        if entry["size"] < 1 or entry["step"] < 0:
            raise ValueError(f"{key} is of {entry['size']} ranks after {entry['step']} steps")
    return entries


def choose(members: Generation, entries: Mapping[str, Saved]) -> dict[str, Saved]:
    """Return the entries this rank resumes from, first the one whose model it takes.

    That is its own, or any where the ranks were equal; the others may have residuals to inherit.
    """
    world, key = members.world, own_key(members.world, entries)
    if key in entries:
        return {key: entries[key]}
    key = key if (key := key_of(world)) in entries else _stand_in(members, entries)
    entry = entries[key]
    if entry["settled"] or not entry["ranks_differ"]:
        moments = {(e["size"], e["step"], e["algorithm"]) for e in entries.values()}
        if len(moments) > 1:
            raise ValueError(
                f"the entries {list(entries)} are of different runs or steps; load what all ranks "
                "saved at the same time"
            )
        return {key: entry, **entries}
    if entry["size"] == world.size:
        raise ValueError(
            f"its entry is missing, found {[*entries]}: every rank saves and loads its own, for "
            "instance by offbeat.save_per_rank() and load_per_rank(), in a folder that all ranks "
            "see if their numbers have changed"
        )
    raise ValueError(
        f"found the state of one of {entry['size']} ranks that had not finished, for a world of "
        f"{world.size}; start {entry['size']} ranks, each with its own state, or call finish() "
        "before saving to change the number of ranks"
    )


def own_key(world: World, entries: Mapping[str, Saved]) -> str:
    """Return the key of the entry that goes on in this rank, in a world of as many ranks; or "".

    Ranks keep their numbers when others are lost, or join in the place of these. A run that starts
    again has others: its first rank goes on for the first one of before.
    """
    entry = entries.get(key_of(world)) or next(iter(entries.values()))
    before = ranks_of(entry)
    if {*before} <= {*world.ranks, *world.lost}:
        # A larger size: saved before losses that this rank has survived.
        return key_of(world) if len(before) >= world.size else ""
    return f"rank{before[world.ranks.index(world.rank)]}" if len(before) == world.size else ""


def ranks_of(entry: Saved) -> list[int]:
    """Return the numbers of the ranks that have saved with this entry, in order."""
    return sorted(r for node in entry.get(NODES) or [range(entry["size"])] for r in node)


def places_of(nodes: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return the ranks of nodes as their places in the order of all.

    >>> places_of([[0, 2], [3, 4]])
    [[0, 1], [2, 3]]
    """
    place = {rank: i for i, rank in enumerate(sorted(r for node in nodes for r in node))}
    return [[place[rank] for rank in node] for node in nodes]


def _stand_in(members: Generation, entries: Mapping[str, Saved]) -> str:
    """Return a key of an entry for a rank that has none: of sharded models one of its shard."""
    if not members.filler.model.is_sharded:
        return next(iter(entries))
    for key, entry in entries.items():
        rank = int(key.removeprefix("rank"))
        if any(rank in n and n.index(rank) == members.world.local_rank for n in entry[NODES]):
            return key
    raise ValueError(
        f"found {[*entries]}, none of them of shard {members.world.local_rank} of a node; load the "
        "entries of all ranks of a node"
    )


def nodes_of(world: World) -> list[list[int]]:
    """Return the ranks of each node, as an entry has them."""
    return [list(node) for node in world.nodes]
