"""Ray Train: checkpoints in which every worker has a part, and the way back from them."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from offbeat.extras import extra
from offbeat.integrations.replicas import consensus
from offbeat.replica.replica import Replica
from offbeat.replica.saving.per_rank import Stateful, load_save, save_per_rank

with extra("ray"):
    import ray.train

__all__ = ["report", "resume"]

MODEL = "model{}.pt"  # in the checkpoint: the state dict of the average model


def report(metrics: dict[str, Any], *, replica: Replica, **parts: Stateful) -> None:
    """Report metrics and a checkpoint of all workers to Ray Train; every worker calls.

    ``parts`` is what a worker needs to continue, by name: ``optimizer=optimizer`` and so on. The
    checkpoint holds them in one file per worker (:func:`offbeat.save_per_rank`), and the average
    model in ``model.pt``, a state dict from rank 0; that of another replica among the parts, such
    as ``critic=critic``, in ``model-critic.pt``. Ray registers it once the files of all workers are
    stored. The metrics are those of rank 0, with ``seconds_stalled`` and ``mb_sent`` of its
    last step.

    Call it between ``replica.step()`` and the next backward. Training continues as if the call had
    not been there.
    """
    last = replica.stats()["last"]
    own = {
        "seconds_stalled": last.get("seconds_stalled", 0.0),
        "mb_sent": last.get("bytes_sent", 0) / 1e6,
    }
    with tempfile.TemporaryDirectory() as folder:
        save_per_rank(folder, replica=replica, **parts)
        models = _models(folder, replica, parts)
        with consensus([*models.values()]):
            if replica.world.rank == 0:
                for path, each in models.items():
                    torch.save(each.model.state_dict(), path)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(own | metrics, checkpoint=checkpoint)


def resume(*, replica: Replica, **parts: Stateful) -> bool:
    """Load the latest checkpoint of the run, if there is one; every worker calls.

    Takes the parts that :func:`report` was given, and returns whether there was a checkpoint.
    ``replica.steps`` is then the number of steps it was saved after.

    Raises ``ValueError`` as :func:`offbeat.load_per_rank` does: under a method whose ranks differ,
    also for another number of workers, unless ``replica.finish()`` came before the report, and for
    a checkpoint that another function has reported.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        # All workers see the files of all. The models come first: a replica then restores what
        # its rank has of its own.
        models = _models(folder, replica, parts)
        if missing := [path.name for path in models if not path.exists()]:
            raise ValueError(
                f"the latest checkpoint of the run has no {missing[0]}; resume(...) takes the "
                "parts that offbeat.integrations.ray.report(...) of this version was given"
            )
        for path, each in models.items():
            each.model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        load_save(folder, {"replica": replica, **parts})
    return True


def _models(folder: str, replica: Replica, parts: dict[str, Stateful]) -> dict[Path, Replica]:
    """Return the replicas by the files of their models."""
    others = {f"-{name}": part for name, part in parts.items() if isinstance(part, Replica)}
    return {Path(folder, MODEL.format(name)): r for name, r in {"": replica, **others}.items()}
