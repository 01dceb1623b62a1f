"""The Trainer of Hugging Face transformers."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from torch import Tensor, nn

from offbeat.exchange import Algorithm
from offbeat.extras import extra
from offbeat.integrations.accelerate import newest_checkpoint
from offbeat.integrations.accelerate_elastic import StorePlace
from offbeat.integrations.replicas import Replicas, consensus, share_of
from offbeat.integrations.transformers_elastic import TrainState
from offbeat.integrations.without_ddp import NoSync, no_sync, require_whole_models, without_ddp
from offbeat.kit.warning import warn
from offbeat.recipes import algorithm as parse
from offbeat.replica.replica import Replica
from offbeat.replica.saving.per_rank import Stateful, load_save, save_per_rank
from offbeat.transport.world import World

with extra("transformers"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint


def attach(
    trainer: Trainer,
    algorithm: str | Algorithm | None = None,
    *,
    mesh: World | None = None,
    elastic: bool = False,
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
        elastic: go on when ranks are lost, and let ranks join, as ``replicate(elastic=True)``. Each
            process is started by itself, with ``OFFBEAT_STORE``; there is no process group. Sets
            ``average_tokens_across_devices`` to False. All ranks evaluate all of the data.

    Raises:
        ValueError: for another trainer, and for ``elastic=True`` with ``mesh``, with ``fp16`` or
            under a launcher that makes a process group. ``train()`` raises as
            :func:`offbeat.replicate`.
    """
    chosen = parse(algorithm)
    require_whole_models(trainer.accelerator)
    if any(isinstance(c, OffbeatCallback) for c in trainer.callback_handler.callbacks):
        raise ValueError("attach() was called before for this trainer; call it once")
    if elastic and (mesh is not None or trainer.accelerator.scaler is not None):
        raise ValueError(
            "elastic=True finds its ranks by OFFBEAT_STORE, and a rank that joins has no loss "
            "scale; leave mesh out, and use bf16=True instead of fp16=True"
        )
    if trainer.args.ddp_broadcast_buffers is False:
        raise ValueError(
            "ddp_broadcast_buffers=False configures a wrapper that the model does not get; remove "
            "it, and under the algorithm ddp pass offbeat.ddp(broadcast_buffers=False)"
        )
    return OffbeatCallback(trainer, chosen, mesh, StorePlace() if elastic else None)


@final
class OffbeatCallback(TrainerCallback):
    """Makes the model of a Trainer a replica while it trains; see :func:`attach`."""

    def __init__(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        mesh: World | None,
        place: StorePlace | None = None,
    ) -> None:
        """Wrap methods of ``trainer``, and become the first of its callbacks."""
        self.trainer, self._place, self._train_state = trainer, place, TrainState(trainer)
        # Attached while training.
        self.replicas = Replicas(algorithm, mesh, elastic=place is not None)
        self._folder: Any = None  # the checkpoint that train() resumes from
        trainer.train = partial(self._train, trainer.train)
        trainer.training_step = partial(self._training_step, trainer.training_step)
        for name, call in (
            ("evaluate", self._evaluate),
            ("predict", self._evaluate),
            ("save_model", self._on_average),
        ):
            setattr(trainer, name, partial(call, getattr(trainer, name)))
        if place is not None:
            trainer.args.average_tokens_across_devices = False
            for name in ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"):
                setattr(trainer, name, partial(self._loader, name, getattr(trainer, name)))
        # Other callbacks see the parameters after an exchange, complete logs and checkpoints.
        trainer.callback_handler.callbacks.insert(0, self)

    @property
    def replica(self) -> Replica | None:
        """The replica of the model, during ``train()``."""
        return next(iter(self.replicas.each), None)

    def on_train_begin(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
        """Replicate the model, after Trainer has loaded a checkpoint, and load this rank's part."""
        if self._place is None:
            self._detach()  # with auto_find_batch_size this is another attempt
            self.replicas.attach(model, [optimizer.optimizer], self.trainer.accelerator.scaler)
        model.no_sync = NoSync(*self.replicas.each)  # type: ignore[assignment]
        if self._place is not None:
            self.trainer.accelerator.no_sync = no_sync  # which sees one process only
        if self.replicas.is_behind:
            self._train_state.begin()
        elif self._folder is not None:
            load_save(self._folder, self._parts())
        self.replicas.measures()  # from here on

    def on_optimizer_step(self, args: Any, state: Any, *_: Any, optimizer: Any, **__: Any) -> None:
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
            if any(self.replica.gather("written" if state.is_world_process_zero else "")):
                save_per_rank(folder, **self._parts())
            else:
                warn(f"the rank that wrote {folder} was lost meanwhile: it is left incomplete")

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
                if self._place is None:
                    return train(self._folder, *args, **kw)
                return self._train_elastically(train, *args, **kw)
        finally:
            self._detach()

    def _train_elastically(self, train: Any, *args: Any, **kwargs: Any) -> Any:
        """Replicate before Trainer reads its counters: a rank that joins has those of others."""
        own = self.trainer
        own.create_optimizer()
        self.replicas.attach(own.model, [getattr(own.optimizer, "optimizer", own.optimizer)])
        self.replicas.each[0].register("trainer", self._train_state)
        self.replicas.each[0].follow(self._adopt)
        self._adopt()
        if not self.replicas.is_behind:
            return train(self._folder, *args, **kwargs)
        with TemporaryDirectory() as folder:
            self._train_state.write(folder)
            own._load_from_checkpoint = lambda *_: None  # it has the model of its donor
            try:
                return train(folder, *args, **kwargs)
            finally:
                del own._load_from_checkpoint

    def _adopt(self) -> None:
        if self._place is not None and self.replica is not None:
            self.trainer.state.is_world_process_zero = self._place.adopt(self.replica)

    def _loader(self, name: str, make: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a loader: of this rank's share for training, of all data for evaluations."""
        assert self._place is not None, "only elastic runs change loaders"
        number, shares = 0, 1
        if name == "get_train_dataloader" and self.replica is not None:
            shares = self._place.starters
            number = share_of(self.replica, shares)
        with self._place.share(number, shares):
            return make(*args, **kwargs)

    def _training_step(self, step: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.replicas.is_behind:
            return torch.zeros((), device=self.trainer.args.device)
        loss: Tensor = step(*args, **kwargs)
        self.replicas.add_loss(loss)
        return loss

    def _evaluate(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Switch a schedule-free optimizer first, as Trainer would on the average."""
        optimizer = self.trainer.optimizer
        if self.replicas.each and callable(switch := getattr(optimizer, "eval", None)):
            switch()
        return self._on_average(method, *args, **kwargs)

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
            vars(self.replica.model).pop("no_sync", None)
            self.replicas.detach()
