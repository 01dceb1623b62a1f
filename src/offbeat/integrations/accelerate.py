"""Training loops of Hugging Face Accelerate."""

import json
import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from offbeat.exchange import Algorithm
from offbeat.extras import extra
from offbeat.integrations.accelerate_elastic import StorePlace
from offbeat.integrations.replicas import consensus, share_of, written
from offbeat.integrations.without_ddp import NoSync, no_sync, require_whole_models, without_ddp
from offbeat.platform.process_group import is_running
from offbeat.recipes import algorithm as parse
from offbeat.replica.replica import Replica
from offbeat.replica.replicate import replicate
from offbeat.replica.saving.per_rank import (
    Stateful,
    alike,
    load_save,
    loads_nothing,
    save_per_rank,
)
from offbeat.replica.saving.rank_files import RankFiles
from offbeat.transport.group import Group
from offbeat.transport.small_gathers import gather_bytes
from offbeat.transport.world import World

with extra("accelerate"):
    from accelerate import Accelerator, PartialState
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    algorithm: str | Algorithm | None = None,
    mesh: World | None = None,
    elastic: bool = False,
    weighted: bool = False,
) -> tuple[Any, ...]:
    """Prepare ``objects`` as ``accelerator.prepare`` does, and replicate the model among them.

    Returns the :class:`~offbeat.Replica`, then the prepared objects in their order. Call it once
    for each model that is trained. From then on ``accelerator.accumulate(model)`` decides which
    backward exchanges gradients; ``step()`` of the last optimizer calls ``replica.step()``, also if
    the ``GradScaler`` has skipped the step; ``accelerator.save_state()`` and ``load_state()`` save
    the average model, and for each rank what belongs to it.

    Args:
        accelerator: without DeepSpeed, FSDP or Megatron-LM.
        objects: one model with trainable parameters, its optimizers, and anything else.
        algorithm: a recipe or its text; by default the variable OFFBEAT_ALGORITHM.
        mesh: the assignment of ranks to nodes, as for :func:`offbeat.replicate`.
        elastic: go on when ranks are lost, and let ranks join, as ``replicate(elastic=True)``. Each
            process is started by itself, with ``OFFBEAT_STORE``; there is no process group.
        weighted: True for ``replica.set_weight()`` and ``replica.uneven()``.

    Raises:
        ValueError: for other arguments, for ``elastic=True`` with ``mesh`` or under a launcher that
            makes a process group, and as :func:`offbeat.replicate`.
    """
    chosen = parse(algorithm)
    require_whole_models(accelerator)
    modules = [o for o in objects if isinstance(o, nn.Module)]
    models = [m for m in modules if any(p.requires_grad for p in m.parameters())]
    given = [o for o in objects if isinstance(o, Optimizer)]
    if len(models) != 1 or not given:
        raise ValueError(
            f"prepare() got {len(models)} models with trainable parameters and {len(given)} "
            "optimizers; call it once for each model that is trained, with its optimizers"
        )
    if elastic and mesh is not None:
        raise ValueError("elastic=True finds its ranks by OFFBEAT_STORE; leave mesh out")
    if elastic and accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "elastic=True with automatic_checkpoint_naming=True: each worker counts its own saves; "
            "leave it out, and name folders by replica.steps in save_state()"
        )
    place = StorePlace() if elastic else None
    # A rank that joins knows its share of the data once it has.
    later = [o for o in objects if isinstance(o, DataLoader)] if elastic else []
    first = [o for o in objects if not any(o is loader for loader in later)]
    with without_ddp(accelerator):
        prepared = accelerator.prepare(*first)
    optimizers = [o for o in prepared if isinstance(o, AcceleratedOptimizer)]
    schedulers = [o for o in prepared if isinstance(o, AcceleratedScheduler)]
    read = {"optimizer": [o.optimizer for o in optimizers], "scaler": accelerator.scaler}
    replica = replicate(models[0], chosen, mesh=mesh, elastic=elastic, weighted=weighted, **read)
    if place is not None:
        accelerator.no_sync = no_sync  # which sees one process only
        place.adopt(replica)
        replica.follow(lambda: place.adopt(replica))
    if place is not None and later:
        with place.share(share_of(replica, place.starters), place.starters):
            loaders = [accelerator.prepare(loader) for loader in later]
        done = dict(zip(map(id, (*first, *later)), (*prepared, *loaders), strict=True))
        prepared = tuple(done[id(o)] for o in objects)
    models[0].no_sync = NoSync(replica)  # type: ignore[assignment]
    _step_after(optimizers[-1], replica)
    checkpoints = vars(accelerator).get("offbeat") or _Checkpoints(accelerator)
    checkpoints.replicas.append(replica)
    checkpoints.others += [*optimizers, *schedulers]
    return (replica, *prepared)


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in ``folder`` that all ranks have written to the end, or None.

    Checkpoints are folders whose names end with a number, for example ``epoch_3``. All ranks call.
    Rank 0 warns if a later one is incomplete, as a rank that is killed while it saves leaves it.
    """
    numbered = {
        path: int(n[0]) for path in Path(folder).glob("*") if (n := _NUMBER.search(path.name))
    }
    # Not by Accelerate, which unpickles what arrives.
    own = json.dumps([str(path) for path in numbered if _is_whole(path)]).encode()
    everyone = gather_bytes(own, Group.of() if is_running() else None)
    whole = set.intersection(*(set(json.loads(text)) for text in everyone))
    # By name where several have one number: all ranks must resume from the same.
    newest = max(map(Path, whole), key=lambda path: (numbered[path], path), default=None)
    incomplete = [p.name for p in numbered if newest and numbered[p] > numbered[newest]]
    if incomplete and PartialState().is_main_process:
        warnings.warn(
            f"{newest} is the newest checkpoint of all ranks; {incomplete} are incomplete",
            RuntimeWarning,
            stacklevel=2,
        )
    return newest


_NUMBER = re.compile(r"\d+$")


def _is_whole(folder: str | os.PathLike[str]) -> bool:
    state = PartialState()
    return any(RankFiles(folder).whole(state.process_index, state.num_processes).values())


def _step_after(optimizer: AcceleratedOptimizer, replica: Replica) -> None:
    """Let ``optimizer.step`` end with ``replica.step``: hooks do not see a step that is skipped."""
    step = optimizer.step

    def both(closure: Callable[[], Any] | None = None) -> None:
        step(closure)
        if optimizer.gradient_state.sync_gradients:
            replica.step()

    optimizer.step = both


@final
class _Checkpoints:
    """Adds to the checkpoints of an accelerator what its ranks do not have in common."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.replicas: list[Replica] = []
        self.others: list[Stateful] = []
        self._save, self._load = accelerator.save_state, accelerator.load_state
        self._free, self._folder = accelerator.free_memory, ""
        accelerator.offbeat = self
        accelerator.save_state, accelerator.load_state = self.save, self.load
        accelerator.free_memory = self.free
        accelerator.register_save_state_pre_hook(self._note_saved)
        accelerator.register_load_state_pre_hook(self._note_folder)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Save the average of each model; save hooks of the user see it, too.

        The files of the ranks come last: where all are, the others are complete.
        """
        if not self.replicas:
            return self._save(*args, **kwargs)
        with consensus(self.replicas):
            write = partial(self._save, *args, **kwargs)
            first = self.replicas[0]
            with alike(first, "cannot write the checkpoint"):
                saved = written(first, lambda: self.accelerator.is_main_process, write)
            save_per_rank(self._folder, **self._parts())
        return saved

    def load(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load what all ranks share, then what belongs to this one; nothing on one that joins."""
        if self.replicas and loads_nothing(self.replicas[0]):
            return
        if input_dir is None and self.accelerator.project_dir is not None:
            input_dir = newest_checkpoint(Path(self.accelerator.project_dir, "checkpoints"))
        self._load(input_dir, *args, **kwargs)
        if self.replicas:
            load_save(self._folder, self._parts())

    def free(self, *objects: Any) -> Any:
        """Forget the replicas together with the models."""
        self.replicas, self.others = [], []
        return self._free(*objects)

    def _note_saved(self, models: object, weights: object, folder: str) -> None:
        if any(isinstance(o, Replica) for o in getattr(self.accelerator, "_custom_objects", ())):
            raise ValueError(
                "a replica was registered for checkpointing, which saves that of rank 0 alone; "
                "remove register_for_checkpointing(replica): save_state() saves those of all ranks"
            )
        self._folder = folder
        if self.replicas and self.accelerator.is_main_process and _is_whole(folder):
            warnings.warn(
                f"save_state() overwrites the files in {folder} one by one, and a rank that is "
                "killed meanwhile loses this checkpoint; save each to a folder of its own",
                RuntimeWarning,
                stacklevel=2,
            )

    def _note_folder(self, models: object, folder: str) -> None:
        self._folder = folder

    def _parts(self) -> dict[str, Stateful]:
        scaler = self.accelerator.scaler
        parts = [*self.replicas, *self.others, *([] if scaler is None else [scaler])]
        return {f"{type(part).__name__}{i}": part for i, part in enumerate(parts)}
