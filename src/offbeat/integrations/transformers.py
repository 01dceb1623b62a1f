"""The Trainer of Hugging Face transformers."""

from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from offbeat.exchange import Algorithm
from offbeat.extras import extra
from offbeat.integrations.accelerate import newest_checkpoint
from offbeat.integrations.replicas import Replicas, consensus
from offbeat.integrations.without_ddp import NoSync, require_whole_models, without_ddp
from offbeat.recipes import algorithm as parse
from offbeat.replica.replica import Replica
from offbeat.replica.saving.per_rank import Stateful, load_save, save_per_rank
from offbeat.transport.world import World

with extra("transformers"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint


def attach(
    trainer: Trainer, algorithm: str | Algorithm | None = None, *, mesh: World | None = None
) -> "OffbeatCallback":
    """Let ``trainer.train()`` train with an algorithm of offbeat; call it once, before.

    Returns a callback whose ``replica`` is the :class:`~offbeat.Replica` during ``train()``.
    Meanwhile ``evaluate``, ``predict`` and ``save_model``, which all ranks call, use the average
    model. Each ``checkpoint-<step>`` also holds what belongs to each rank, for
    ``train(resume_from_checkpoint=...)``. Logs show ``seconds_stalled`` and ``mb_sent`` (10^6
    bytes) of this rank: the means over the steps since the last log.

    Args:
        trainer: of any class; one process per device, without DeepSpeed or FSDP.
        algorithm: a recipe or its text; by default the variable OFFBEAT_ALGORITHM.
        mesh: the assignment of ranks to nodes, as for :func:`offbeat.replicate`.

    Raises:
        ValueError: for another trainer. ``train()`` raises as :func:`offbeat.replicate`.
    """
    chosen = parse(algorithm)
    require_whole_models(trainer.accelerator)
    if any(isinstance(c, OffbeatCallback) for c in trainer.callback_handler.callbacks):
        raise ValueError("attach() was called before for this trainer; call it once")
    return OffbeatCallback(trainer, chosen, mesh)


@final
class OffbeatCallback(TrainerCallback):
    """Makes the model of a Trainer a replica while it trains; see :func:`attach`."""

    def __init__(self, trainer: Trainer, algorithm: Algorithm, mesh: World | None) -> None:
        """Wrap methods of ``trainer``, and become the first of its callbacks."""
        self.trainer, self.replicas = trainer, Replicas(algorithm, mesh)  # attached while training
        self._folder: Any = None  # the checkpoint that train() resumes from
        trainer.train = partial(self._train, trainer.train)
        trainer.training_step = partial(self._training_step, trainer.training_step)
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, partial(self._on_average, getattr(trainer, name)))
        # Other callbacks see the parameters after an exchange, complete logs and checkpoints.
        trainer.callback_handler.callbacks.insert(0, self)

    @property
    def replica(self) -> Replica | None:
        """The replica of the model, during ``train()``."""
        return next(iter(self.replicas.each), None)

    def on_train_begin(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
        """Replicate the model, after Trainer has loaded a checkpoint, and load this rank's part."""
        self._detach()  # with auto_find_batch_size this is another attempt
        self.replicas.attach(model, [optimizer.optimizer], self.trainer.accelerator.scaler)
        model.no_sync = NoSync(*self.replicas.each)  # type: ignore[assignment]
        if self._folder is not None:
            load_save(self._folder, self._parts())
        self.replicas.measures()  # from here on

    def on_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Exchange parameters, also on a rank whose GradScaler has skipped the step."""
        self.replicas.step(optimizer.optimizer)

    def on_log(self, args: Any, state: Any, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Add what was sent and how long it stalled to the log of a training loss."""
        if self.replica is not None and "loss" in logs:
            shown = self.replicas.measures()
            logs |= shown
            state.log_history[-1] |= shown

    def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
        """Report the loss of an evaluation."""
        if self.replica is not None and "eval_loss" in metrics:
            self.replica.report_loss(metrics["eval_loss"], "heldout")

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Save what belongs to this rank beside the checkpoint that Trainer has written."""
        if self.replica is not None and not args.save_only_model:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            save_per_rank(folder, **self._parts())

    def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Set all ranks to the average, unless Trainer has just loaded the best model."""
        assert self.replica is not None, "training has begun"
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            with self.replica.consensus():
                pass  # what is in flight is received and not merged
            if self.replica.consensus_distance()["max"] > 0:
                raise ValueError(
                    f"not all ranks have loaded {state.best_model_checkpoint}; use an output_dir "
                    "that all nodes share, or save_on_each_node=True"
                )
        else:
            self.replica.finish()
        self._detach()

    def _train(self, train: Any, resume_from_checkpoint: Any = None, *args: Any, **kw: Any) -> Any:
        self._folder = resume_from_checkpoint or None
        if self._folder is True:  # it remains so if there is no checkpoint, and Trainer says so
            root = self.trainer.args.output_dir
            newest = newest_checkpoint(root)
            self._folder = str(newest) if newest else get_last_checkpoint(root) or True
        try:
            with without_ddp(self.trainer.accelerator):
                return train(self._folder, *args, **kw)
        finally:
            self._detach()

    def _training_step(self, step: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = step(*args, **kwargs)
        self.replicas.add_loss(loss)
        return loss

    def _on_average(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        with consensus(self.replicas.each):  # none before train() and after it
            return method(*args, **kwargs)

    def _parts(self) -> dict[str, Stateful]:
        own, scaler = self.trainer, self.trainer.accelerator.scaler
        parts = {"optimizer": own.optimizer, "scheduler": own.lr_scheduler, "scaler": scaler}
        parts["replica"] = self.replica
        return {name: part for name, part in parts.items() if part is not None}

    def _detach(self) -> None:
        if self.replica is not None:
            del self.replica.model.no_sync
            self.replicas.detach()
