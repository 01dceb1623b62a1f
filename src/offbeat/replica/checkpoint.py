"""The state that a replica saves on each rank, and the continuation of a run from it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.comm.group import Group
from offbeat.comm.small_gathers import raise_alike
from offbeat.comm.world import World
from offbeat.exchange import Algorithm, Saved
from offbeat.functional import pack
from offbeat.replica.slots import GradientSlot, ParameterSlot

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


class Parts(NamedTuple):
    """The parts of a replica that are saved, or that a saved state is loaded into."""

    model: nn.Module
    world: World
    algorithm: Algorithm
    gradients: GradientSlot[Any]
    parameters: ParameterSlot[Any]

    @property
    def key(self) -> str:
        """The name of this rank's entry.

        Tools that write one folder for all ranks keep a single copy of values with equal names,
        so the name contains the rank.
        """
        return f"rank{self.world.rank}"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers by name."""
        return {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks may hold different parameters between exchanges."""
        gradients = self.algorithm.gradients
        return (
            self.algorithm.parameters is not None or gradients is None or gradients.over != "world"
        )


def save(parts: Parts, step: int, settled: bool) -> Saved:
    """Return ``{"rank<r>": entry}``: tensors and plain values, copies of their own.

    Parameters are included where ranks may differ, persistent buffers always.
    """
    kept = parts.model.state_dict(keep_vars=True)
    tensors = {name: b for name, b in parts.model.named_buffers() if name in kept}
    if parts.ranks_differ:
        tensors |= dict(parts.model.named_parameters())
    entry = {
        "size": parts.world.size,
        "step": step,
        "settled": settled,
        "ranks_differ": parts.ranks_differ,
        "algorithm": repr(parts.algorithm),
        "gradients": parts.gradients.save(),
        "parameters": parts.parameters.save(),
        "model": {name: tensor.detach().clone() for name, tensor in tensors.items()},
    }
    return {parts.key: entry}


def load(parts: Parts, saved: Saved, control: Group | None) -> tuple[int, bool]:
    """Restore a saved state and return its step, and whether all replicas were equal then.

    If the state of any rank is unfit all ranks raise the same ValueError before they change
    anything.
    """
    entry = _find_entry(parts, saved)
    raise_alike(entry if isinstance(entry, str) else _unfit(parts, saved, entry), control)
    assert not isinstance(entry, str), "a missing entry was raised"
    own = parts.tensors
    with torch.no_grad():
        pack([own[name] for name in entry["model"]], entry["model"].values())
    gradients = _inherited(parts, saved, entry)
    if gradients is not None:
        parts.gradients.load(gradients)
    if _continues(parts, entry):
        parts.parameters.load(entry["parameters"])
    else:
        parts.parameters.settle()  # equal replicas start anew, whatever this one did before
    return int(entry["step"]), bool(entry["settled"])


def _find_entry(parts: Parts, saved: object) -> Saved | str:
    """Return this rank's entry, any other where the ranks were equal, or what is wrong."""
    entries = saved if isinstance(saved, dict) else {}
    entry = entries.get(parts.key)
    if entry is None:
        entry = next((e for key, e in entries.items() if str(key).startswith("rank")), None)
    if not isinstance(entry, dict) or not set(entry) >= _KEYS:
        return f"cannot load {str(saved)[:60]}; pass what state_dict() returned after a step()"
    if entry["size"] == parts.world.size and parts.key in entries:
        return entry
    if entry["settled"] or not entry["ranks_differ"]:
        return entry
    return (
        f"found the state of one of {entry['size']} ranks that had not finished, for a world of "
        f"{parts.world.size}; call finish() before saving to change the number of ranks"
    )


def _inherited(parts: Parts, saved: Saved, entry: Saved) -> Saved | None:
    """Return the state for the gradients slot: of its own rank, merged from several, or None."""
    if parts.gradients.is_empty or entry["algorithm"] != repr(parts.algorithm):
        return None
    world = parts.world
    if entry["size"] == world.size and parts.key in saved:
        own: Saved = entry["gradients"]
        return own
    entries = {int(key[4:]): e["gradients"] for key, e in saved.items() if str(key)[:4] == "rank"}
    return parts.gradients.inherit(entries, entry["size"], world.rank, world.size)


def _unfit(parts: Parts, saved: Saved, entry: Saved) -> str | None:
    """Return why this entry cannot be loaded, or None."""
    if entry["algorithm"] != repr(parts.algorithm) and not entry["settled"]:
        return (
            f"found the state of {entry['algorithm']}, but this replica runs {parts.algorithm}; "
            "call finish() before saving to change the algorithm"
        )
    own = parts.tensors
    unknown = sorted(set(entry["model"]) - set(own))
    if unknown:
        return f"this model has no {unknown[0]!r}"
    if _continues(parts, entry):
        (expected,) = save(parts, 0, settled=False).values()
    else:
        expected = {"model": {name: own[name] for name in entry["model"]}}
    try:
        _inherited(parts, saved, entry)
    except ValueError as error:
        return str(error)
    return _difference(expected, entry, "state")


def _continues(parts: Parts, entry: Saved) -> bool:
    """Return whether the parameters slot continues as saved.

    Otherwise all ranks were equal when the state was saved, and the slot starts anew.
    """
    return bool(entry["algorithm"] == repr(parts.algorithm) and entry["size"] == parts.world.size)


def _difference(own: Any, found: Any, path: str) -> str | None:
    """Return where a saved state differs in structure: a name, a shape or a kind of value."""
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
