"""What a replica saves, per rank, and how it goes on from there."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offbeat.collectives import raise_alike
from offbeat.exchange import Saved
from offbeat.functional import pack
from offbeat.groups import Group

if TYPE_CHECKING:
    from offbeat.replica import Replica


def save(replica: "Replica") -> Saved:
    """``{"rank<r>": ...}``: tensors and plain values, copies of their own.

    The key carries the rank because tools that write one folder keep a single copy of values
    with equal names. Parameters are included where ranks may differ, buffers always.
    """
    slots = {}
    for slot in ("gradients", "parameters"):
        exchange, state = replica.slot(slot)
        slots[slot] = exchange.save(state) if exchange is not None else {}
    model = dict(_buffers(replica.model))
    if replica.slot("parameters")[0] is not None:
        model |= dict(replica.model.named_parameters())
    entry = {
        "size": replica.groups.size,
        "step": replica.steps,
        "settled": replica.settled,
        "algorithm": repr(replica.algorithm),
        **slots,
        "model": {name: tensor.detach().clone() for name, tensor in model.items()},
    }
    return {f"rank{replica.groups.rank}": entry}


def load(replica: "Replica", saved: Saved, control: Group | None) -> None:
    """Take over a saved state; all ranks raise alike if one of them cannot."""
    entry = _entry(replica, saved)
    raise_alike(entry if isinstance(entry, str) else _fault(replica, entry), control)
    assert not isinstance(entry, str), "a missing entry was raised"
    own = {**dict(_buffers(replica.model)), **dict(replica.model.named_parameters())}
    with torch.no_grad():
        pack([own[name] for name in entry["model"]], entry["model"].values())
    if entry["algorithm"] == repr(replica.algorithm):
        for slot in ("gradients", "parameters"):
            exchange, state = replica.slot(slot)
            if exchange is not None and entry[slot]:
                exchange.load(state, entry[slot])
    replica.steps, replica.settled = int(entry["step"]), bool(entry["settled"])


def _entry(replica: "Replica", saved: Saved) -> Saved | str:
    """This rank's entry, or any other where the ranks were equal, or what is wrong."""
    entry: Saved | None = saved.get(f"rank{replica.groups.rank}")
    if entry is not None and entry["size"] == replica.groups.size:
        return entry
    entry = entry or next((e for key, e in saved.items() if key.startswith("rank")), None)
    if entry is None:
        return f"found no 'rank<r>' key among {list(saved)[:3]}; pass what state_dict() returned"
    if entry["settled"] or not entry["parameters"]:
        return entry
    return (
        f"found the state of one of {entry['size']} ranks that had not finished, for a world of "
        f"{replica.groups.size}; call finish() before saving to change the number of ranks"
    )


def _fault(replica: "Replica", entry: Saved) -> str | None:
    own = {**dict(_buffers(replica.model)), **dict(replica.model.named_parameters())}
    for name, tensor in entry["model"].items():
        if name not in own or own[name].shape != tensor.shape:
            return f"found {name!r} of shape {tuple(tensor.shape)}, which this model lacks"
    if entry["algorithm"] != repr(replica.algorithm) and not entry["settled"]:
        return (
            f"found the state of {entry['algorithm']}, but this replica runs {replica.algorithm}; "
            "call finish() before saving to change the algorithm"
        )
    return None


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
