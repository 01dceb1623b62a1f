"""What a replica saves, per rank, and how it goes on from there."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.comm.agreement import raise_alike
from offbeat.comm.group import Group
from offbeat.exchange import Saved
from offbeat.functional import pack

if TYPE_CHECKING:
    from offbeat.replica.replica import Replica

_KEYS = {
    "size",
    "step",
    "settled",
    "ranks_differ",
    "algorithm",
    "gradients",
    "parameters",
    "model",
}


def save(replica: "Replica") -> Saved:
    """``{"rank<r>": ...}``: tensors and plain values, copies of their own.

    The key carries the rank because tools that write one folder keep a single copy of values
    with equal names. Parameters are included where ranks may differ, buffers always.
    """
    slots = {}
    for slot in ("gradients", "parameters"):
        exchange, state = replica.slot(slot)
        slots[slot] = exchange.save(state) if exchange is not None else {}
    model = {name: tensor.detach().clone() for name, tensor in _tensors(replica).items()}
    entry = {
        "size": replica.world.size,
        "step": replica.steps,
        "settled": replica.settled,
        "ranks_differ": _ranks_differ(replica),
        "algorithm": repr(replica.algorithm),
        **slots,
        "model": model,
    }
    return {f"rank{replica.world.rank}": entry}


def load(replica: "Replica", saved: Saved, control: Group | None) -> None:
    """Take over a saved state; all ranks raise alike if one of them cannot."""
    entry = _entry(replica, saved)
    raise_alike(entry if isinstance(entry, str) else _fault(replica, saved, entry), control)
    assert not isinstance(entry, str), "a missing entry was raised"
    own = _own(replica)
    with torch.no_grad():
        pack([own[name] for name in entry["model"]], entry["model"].values())
    exchange, state = replica.slot("gradients")
    gradients = _inherited(replica, saved, entry)
    if gradients is not None:
        exchange.load(state, gradients)
    exchange, state = replica.slot("parameters")
    if exchange is not None and _continues(replica, entry):
        exchange.load(state, entry["parameters"])
    elif exchange is not None:
        exchange.settle(state)  # equal replicas start anew, whatever this one did before
    replica.steps, replica.settled = int(entry["step"]), bool(entry["settled"])


def _entry(replica: "Replica", saved: object) -> Saved | str:
    """This rank's entry, or any other where the ranks were equal, or what is wrong."""
    entries = saved if isinstance(saved, dict) else {}
    entry = entries.get(f"rank{replica.world.rank}")
    if entry is None:
        entry = next((e for key, e in entries.items() if str(key).startswith("rank")), None)
    if not isinstance(entry, dict) or not set(entry) >= _KEYS:
        return f"cannot load {str(saved)[:60]}; pass what state_dict() returned after a step()"
    if entry["size"] == replica.world.size and f"rank{replica.world.rank}" in entries:
        return entry
    if entry["settled"] or not entry["ranks_differ"]:
        return entry
    return (
        f"found the state of one of {entry['size']} ranks that had not finished, for a world of "
        f"{replica.world.size}; call finish() before saving to change the number of ranks"
    )


def _inherited(replica: "Replica", saved: Saved, entry: Saved) -> Saved | None:
    """What the gradients slot goes on with, of its own rank's part or of several; or None."""
    exchange, _ = replica.slot("gradients")
    if exchange is None or entry["algorithm"] != repr(replica.algorithm):
        return None
    world = replica.world
    if entry["size"] == world.size and f"rank{world.rank}" in saved:
        own: Saved = entry["gradients"]
        return own
    parts = {int(key[4:]): e["gradients"] for key, e in saved.items() if str(key)[:4] == "rank"}
    inherited: Saved | None = exchange.inherit(parts, entry["size"], world.rank, world.size)
    return inherited


def _fault(replica: "Replica", saved: Saved, entry: Saved) -> str | None:
    if entry["algorithm"] != repr(replica.algorithm) and not entry["settled"]:
        return (
            f"found the state of {entry['algorithm']}, but this replica runs {replica.algorithm}; "
            "call finish() before saving to change the algorithm"
        )
    own = _own(replica)
    unknown = sorted(set(entry["model"]) - set(own))
    if unknown:
        return f"this model has no {unknown[0]!r}"
    if _continues(replica, entry):
        (expected,) = save(replica).values()
    else:
        expected = {"model": {name: own[name] for name in entry["model"]}}
    try:
        _inherited(replica, saved, entry)
    except ValueError as error:
        return str(error)
    return _difference(expected, entry, "state")


def _continues(replica: "Replica", entry: Saved) -> bool:
    """Whether the slots go on as saved; otherwise all ranks were equal, and start anew."""
    same = entry["algorithm"] == repr(replica.algorithm)
    return same and bool(entry["size"] == replica.world.size)


def _own(replica: "Replica") -> dict[str, Tensor]:
    return {**dict(replica.model.named_buffers()), **dict(replica.model.named_parameters())}


def _difference(own: Any, found: Any, path: str) -> str | None:
    """Where a saved state is not made as ours is: a name, a shape or a kind of value."""
    if isinstance(own, Tensor):
        if not isinstance(found, Tensor) or found.shape != own.shape:
            return f"{path} is {str(found)[:40]}, expected a tensor of shape {tuple(own.shape)}"
    elif isinstance(own, dict) and isinstance(found, dict):
        for key, value in own.items():
            if key not in found:
                return f"{path} lacks {key!r}"
            fault = _difference(value, found[key], f"{path}[{key!r}]")
            if fault is not None:
                return fault
    elif type(own) is not type(found):
        return f"{path} is {str(found)[:40]!r}, expected a {type(own).__name__}"
    return None


def _tensors(replica: "Replica") -> dict[str, Tensor]:
    kept = replica.model.state_dict(keep_vars=True)
    tensors = {name: b for name, b in replica.model.named_buffers() if name in kept}
    if _ranks_differ(replica):
        tensors |= dict(replica.model.named_parameters())
    return tensors


def _ranks_differ(replica: "Replica") -> bool:
    gradients, parameters = replica.algorithm.gradients, replica.algorithm.parameters
    return parameters is not None or gradients is None or gradients.over != "world"
