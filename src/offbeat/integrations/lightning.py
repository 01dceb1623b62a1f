"""Lightning: a strategy for the Trainer."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, final

import fsspec
from torch import Tensor
from torch.optim import Optimizer

from offbeat.exchange import Algorithm
from offbeat.extras import extra
from offbeat.integrations.lightning_elastic import ElasticDDPStrategy, StoreEnvironment
from offbeat.integrations.replicas import Replicas, consensus, written
from offbeat.integrations.without_ddp import NoSync
from offbeat.platform.process_group import TIMEOUT
from offbeat.recipes import algorithm as parsed
from offbeat.replica.saving.per_rank import load_save, saving
from offbeat.replica.uneven import Uneven
from offbeat.transport.world import World

with extra("lightning"):
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import StrategyRegistry
    from lightning.pytorch.utilities import rank_zero_warn

Path = str | os.PathLike[str]
_SAVE = "offbeat_save"  # in a checkpoint: the number of the ranks' save beside it, 0 for none


class OffbeatStrategy(ElasticDDPStrategy):
    """Trains a LightningModule with any recipe: ``Trainer(strategy=OffbeatStrategy("sgp"))``.

    The model is not wrapped. Each optimizer has a replica, which exchanges after its steps.
    Validation sees the average of all ranks, checkpoints contain it, and ``fit`` ends with it.
    Beside a checkpoint, the folder ``<checkpoint>.offbeat`` holds one file per rank with its
    optimizers, its loss scale and its replicas. ``seconds_stalled`` and ``mb_sent`` of each step
    are logged every ``log_every_n_steps`` steps, as means.

    Args:
        algorithm: a recipe or its text; by default the variable OFFBEAT_ALGORITHM. Unknown ones
            raise ``ValueError``.
        mesh: the assignment of ranks to nodes, as for :func:`offbeat.replicate`.
        weighted: True for :meth:`set_weight` and :meth:`uneven`, as for :func:`offbeat.replicate`.
        cluster_environment: who starts the processes; by default found by the Trainer.
        checkpoint_io: writes the Trainer's checkpoints.
        precision_plugin: by default made from ``Trainer(precision=...)``.
        process_group_backend: by default ``gloo`` on CPUs and ``nccl`` on CUDA.
        timeout: of the process group.
        start_method: how the Trainer starts further processes.
        elastic: go on when ranks are lost, and let ranks join, as ``replicate(elastic=True)``. The
            processes are started one by one, or by torchrun, with ``OFFBEAT_STORE``; there is no
            process group. Raises ``ValueError`` with ``mesh`` or ``cluster_environment``.

    ``Trainer(strategy="offbeat")`` is the same without arguments, once this module is imported.

    >>> strategy = OffbeatStrategy("sgp(overlap=1)")
    >>> strategy.replicas.algorithm.parameters.overlap
    1
    """

    strategy_name = "offbeat"

    def __init__(
        self,
        algorithm: str | Algorithm | None = None,
        *,
        mesh: World | None = None,
        weighted: bool = False,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        elastic: bool = False,
    ) -> None:
        if elastic and (mesh is not None or cluster_environment is not None):
            raise ValueError(
                "elastic=True finds its ranks by OFFBEAT_STORE; leave mesh and cluster_environment "
                "out"
            )
        self.replicas = Replicas(parsed(algorithm), mesh, elastic, weighted)  # attached in fit()
        super().__init__(  # named one by one: jsonargparse reads them, for LightningCLI
            cluster_environment=StoreEnvironment() if elastic else cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._shown = ExitStack()  # the average, during validation
        self._first = _First(self)
        self._loaded_from: tuple[str, int | None] = "", None  # a folder, and which save in it

    def setup(self, trainer: Trainer) -> None:
        """Set up, with a callback before all others."""
        super().setup(trainer)
        if not self._exchanges_gradients_alone:
            self._leave_ranks_apart(trainer)
        if self._first not in trainer.callbacks:
            trainer.callbacks.insert(0, self._first)

    @property
    def _exchanges_gradients_alone(self) -> bool:
        algorithm = self.replicas.algorithm
        return algorithm.auto is None and not any(each.parameters for each in algorithm.phases)

    def _leave_ranks_apart(self, trainer: Trainer) -> None:
        """Let a rank that gets SIGTERM end by itself; the others find that it has left.

        Lightning (2.6) has rank 0 tell of the signal before each batch, for which all would wait,
        and broadcasts in the handler, for which nobody would come.
        """
        waits, loop = "_broadcast_sigterm_tensor", trainer.fit_loop.epoch_loop
        if not hasattr(loop, waits):
            return
        setattr(loop, waits, lambda: None)
        connector = trainer._signal_connector

        def note(number: Any, frame: Any) -> None:
            if not connector.received_sigterm and self.launcher is not None:
                self.launcher.kill(number)
            connector.received_sigterm = True

        connector._sigterm_notifier_fn = note

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Exchange no gradients inside the block: they accumulate."""
        return NoSync(*self.replicas.each)()

    def set_weight(self, samples: float) -> None:
        """Say how many samples the coming step of this rank stands for; in ``training_step``."""
        self.replicas.set_weight(samples)

    def uneven(self, batches: Iterable[Any], filler: Any = None) -> Uneven[Any]:
        """Return what ``train_dataloader()`` returns where ranks have different numbers of batches.

        See :meth:`offbeat.Replica.uneven`. All ranks call.
        """
        return self.replicas.uneven(batches, filler)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on the next batch."""
        self.replicas.begin_batch(self.lightning_module.trainer.fit_loop.total_batch_idx)
        return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Report the loss, which Lightning has divided by the number of micro-batches."""
        self.replicas.add_loss(closure_loss)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer, then its replica: also if a scaler has skipped the former."""
        if self.replicas.is_behind:
            self.catch_up(optimizer, closure)
            return None
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.replicas.step(optimizer)
        every = self.lightning_module.trainer.log_every_n_steps
        steps = self.replicas.steps_of_first(optimizer)
        if steps is not None and self.lightning_module.automatic_optimization:
            # As its logger counts, also in a second fit().
            steps = self.lightning_module.trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        if every > 0 and steps is not None and steps % every == 0:
            self.lightning_module.log_dict(self.replicas.measures(), prog_bar=True)
        return output

    def show_average(self) -> None:
        """Show the average; ``ModelCheckpoint`` saves before :meth:`on_validation_end`."""
        self._shown.enter_context(consensus(self.replicas.each))

    def on_validation_end(self) -> None:
        """Return to each rank's own parameters."""
        self._shown.close()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, unless an exception has ended this one."""
        if not self._is_interrupted:  # it may save a checkpoint, which the others do not
            super().barrier(*args, **kwargs)

    def on_train_end(self) -> None:
        """Set all ranks to the average, including weights that callbacks have set at the end."""
        self.replicas.finish()

    def teardown(self) -> None:
        """Detach the replicas."""
        self._shown.close()
        self.replicas.detach()
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the average model; all ranks call."""
        # An exception has ended this rank: the others may not take part in an average.
        with nullcontext() if self._is_interrupted else consensus(self.replicas.each):
            state = super().lightning_module_state_dict()
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any = None
    ) -> None:
        """Save the state of each rank, then on rank 0 the checkpoint, which names it."""
        is_whole = "optimizer_states" in checkpoint and not self._is_interrupted
        parts = self.replicas.parts() if self.replicas.each and is_whole else {}
        write = super().save_checkpoint
        if not parts:
            write(checkpoint | {_SAVE: 0}, filepath, storage_options)
            return
        with saving(_folder(filepath), **parts) as number:
            given = checkpoint | {_SAVE: number}, filepath, storage_options
            written(self.replicas.each[0], lambda: self.is_global_zero, partial(write, *given))

    def remove_checkpoint(self, filepath: Path) -> None:
        """Remove the checkpoint and what lies beside it."""
        is_link = os.path.islink(filepath)  # "last.ckpt" to a checkpoint that is kept
        super().remove_checkpoint(filepath)
        files, root = fsspec.core.url_to_fs(_folder(filepath))
        # Nodes may have file systems of their own, or share one.
        if self.local_rank == 0 and not is_link:
            with suppress(FileNotFoundError):
                files.rm(root, recursive=True)

    def load_checkpoint(self, checkpoint_path: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint, and note where the state of each rank lies."""
        loaded = dict(super().load_checkpoint(checkpoint_path, *args, **kwargs))
        self._loaded_from = _folder(checkpoint_path), loaded.get(_SAVE)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, then the state of each rank."""
        super().load_optimizer_state_dict(checkpoint)
        folder, number = self._loaded_from
        files, root = fsspec.core.url_to_fs(folder)
        if number != 0 and self.reduce_boolean_decision(files.exists(root), all=False):
            load_save(folder, self.replicas.parts(), number)
            self.replicas.measures()  # from here on
        else:
            rank_zero_warn(
                f"{folder} holds no state of the ranks: the checkpoint is of another strategy, or "
                "of a moment after fit(), and all ranks start from its model and optimizer"
            )

    @property
    def _is_interrupted(self) -> bool:
        model = self.lightning_module  # None before a Trainer has one
        return model is not None and bool(model.trainer.interrupted)


@final
class _First(Callback):
    """Runs hooks of the strategy before all callbacks; Lightning runs its own hooks last.

    A callback that swaps in other weights for validation would otherwise swap the average out, and
    messages in flight would be merged into weights that a callback sets at the end.
    """

    def __init__(self, strategy: OffbeatStrategy) -> None:
        self.strategy = strategy

    def on_validation_start(self, *_: Any) -> None:
        """Show the average."""
        self.strategy.show_average()

    def on_train_end(self, *_: Any) -> None:
        """Set all ranks to the average."""
        self.strategy.replicas.finish()


def _folder(checkpoint: Path) -> str:
    """Return the folder beside a checkpoint; ``last.ckpt`` may be a link to another."""
    path = os.fspath(checkpoint)
    return (path if "://" in path else os.path.realpath(path)) + ".offbeat"


StrategyRegistry.register(OffbeatStrategy.strategy_name, OffbeatStrategy, OffbeatStrategy.__doc__)
