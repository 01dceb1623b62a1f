"""A strategy of Lightning whose ranks may be lost, and others join, while it fits."""

import os
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.extras import extra
from offbeat.integrations.replicas import Replicas, share_of
from offbeat.integrations.without_ddp import NoSync
from offbeat.transport.world import World

with extra("lightning"):
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn


class ElasticDDPStrategy(DDPStrategy):
    """With ``replicas.elastic``, what ranks tell each other goes through the replica.

    A process group of torch, whose ranks are fixed, would break with the first that is lost. So
    there is none, and no barrier: replicas wait for each other where they exchange.
    """

    replicas: Replicas

    def setup_distributed(self) -> None:
        """Find the place of this rank; wait for those that start the run."""
        if not self.replicas.elastic:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()

    def setup(self, trainer: Trainer) -> None:
        """Set up for ``fit``, in an elastic run for nothing else."""
        if self.replicas.elastic and trainer.state.fn != TrainerFn.FITTING:
            raise ValueError(
                "OffbeatStrategy(elastic=True) is for fit(); evaluate by a Trainer with another "
                "strategy"
            )
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers and their replicas; a rank that joins enters the loop of others."""
        super().setup_optimizers(trainer)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if self.replicas.elastic and not self.lightning_module.automatic_optimization:
            raise ValueError(
                "elastic=True needs automatic optimization: a rank that joins enters the loop in "
                "the middle of a step"
            )
        self.replicas.attach(self.lightning_module, self.optimizers, scaler)
        if self.replicas.elastic:
            self.adopt()
            self.replicas.each[0].follow(self.adopt)
            for callback in _saving(trainer):  # each rank has made up its own folder
                callback.dirpath = self.broadcast(callback.dirpath)
            self.replicas.each[0].register("lightning", FitState(trainer))

    def adopt(self) -> None:
        """Take over who takes part now: its first rank writes logs and checkpoints."""
        environment, (replica,) = self.cluster_environment, self.replicas.each
        if isinstance(environment, StoreEnvironment) and environment.world is not replica.world:
            environment.world = replica.world
            self.set_world_ranks()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As many shares as ranks have started the run; one that joins gets that of a lost one."""
        environment = self.cluster_environment
        if not isinstance(environment, StoreEnvironment):
            inherited: dict[str, Any] = super().distributed_sampler_kwargs
            return inherited
        rank = share_of(self.replicas.each[0], environment.starters) if self.replicas.each else 0
        return {"num_replicas": environment.starters, "rank": rank}

    def catch_up(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        """Make the step in which this rank has joined, of which it keeps nothing but the logs.

        Its donor had begun to count it, so it is counted once too often.
        """
        module, (replica,) = self.lightning_module, self.replicas.each
        buffers = [buffer.clone() for buffer in module.buffers()]
        with NoSync(replica)():
            closure()
        with torch.no_grad():
            for buffer, before in zip(module.buffers(), buffers, strict=True):
                buffer.copy_(before)
        optimizer.zero_grad()
        self.replicas.step(optimizer)
        loop = module.trainer.fit_loop
        batches, steps = (
            loop.epoch_loop.batch_progress.total,
            loop.epoch_loop.automatic_optimization,
        )
        batches.ready, batches.started = batches.ready - 1, batches.started - 1
        steps.optim_progress.optimizer.step.total.ready -= 1
        loop.epoch_loop._batches_that_stepped -= 1
        loop.restarting = False  # at the end of this epoch it is a rank as any other

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, but not in an elastic run."""
        if not self.replicas.elastic:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank ``src`` passes; in an elastic run of those that take part."""
        if not self.replicas.elastic:
            return super().broadcast(obj, src)
        values = self.replicas.gather(obj)  # of all: whoever is first now may be lost meanwhile
        return values[min(src, len(values) - 1)]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks."""
        if not self.replicas.elastic:
            return super().reduce(tensor, group, reduce_op)
        if not isinstance(tensor, Tensor):
            return tensor
        held = torch.stack(self.replicas.gather(tensor.detach().cpu()))
        name = getattr(reduce_op, "name", reduce_op or "mean").lower()
        if name in ("mean", "avg"):
            result = held.mean(0) if held.is_floating_point() else held.sum(0) // len(held)
        else:
            result = getattr(held, {"sum": "sum", "max": "amax", "min": "amin"}[name])(0)
        return result.to(tensor.device, tensor.dtype)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, decide so."""
        if not self.replicas.elastic:
            return bool(super().reduce_boolean_decision(decision, all))
        decisions = self.replicas.gather(bool(decision))
        return False not in decisions if all else True in decisions

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks."""
        if not self.replicas.elastic:
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)
            return gathered
        if sync_grads:
            raise ValueError("elastic=True gathers no gradients; leave sync_grads out")
        return torch.stack(self.replicas.gather(tensor.detach().cpu())).to(tensor.device)


@final
class StoreEnvironment(ClusterEnvironment):
    """The ranks that meet in the store at ``OFFBEAT_STORE``, numbered anew when one is lost."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # of the process group, which there is not

    def __init__(self) -> None:
        """Connect later: a strategy is also made to be printed."""
        self._world: World | None = None
        self._starters = 0

    @property
    def world(self) -> World:
        """The layout of the ranks that take part; waits for a place in it."""
        if self._world is None:
            self._world = World.from_env(elastic=True)
            self._starters = self._world.size - self._world.is_new
        return self._world

    @world.setter
    def world(self, world: World) -> None:
        self._world = world

    @property
    def starters(self) -> int:
        """How many ranks have started the run."""
        return self._starters if self.world else 0

    @staticmethod
    def detect() -> bool:
        """Not by itself."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks that take part."""
        return self.world.size

    def global_rank(self) -> int:
        """Return the number of this rank among those that take part: the first saves and logs."""
        return self.world.ranks.index(self.world.rank)

    def local_rank(self) -> int:
        """Return which of the launcher's processes this is."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        """Return the number of the launcher's node."""
        return int(os.environ.get("GROUP_RANK", "0"))

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""


@final
class FitState:
    """Where ``fit`` is in the middle of a step: loops, schedulers and callbacks.

    A donor is asked for it in its optimizer step, when this step is not counted. A rank that joins
    restarts the batch, exchanges nothing in it, and counts it together with the others: so it also
    takes part in the validation, the save or the end of the epoch that may follow.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Speak for ``trainer``."""
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        configs = self.trainer.strategy.lr_scheduler_configs
        callbacks = {c.state_key: c.state_dict() for c in self.trainer.callbacks}
        return {
            "fit": self.trainer.fit_loop.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in configs],
            "callbacks": callbacks,
            "dirpaths": [callback.dirpath for callback in _saving(self.trainer)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; a checkpoint that ``fit`` was given is older, and not loaded."""
        trainer = self.trainer
        trainer._checkpoint_connector._loaded_checkpoint = {}
        trainer.fit_loop.load_state_dict(state["fit"])
        configs = trainer.strategy.lr_scheduler_configs
        for config, saved in zip(configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)
        for callback, path in zip(_saving(trainer), state["dirpaths"], strict=True):
            callback.dirpath = path
        for callback in trainer.callbacks:
            if saved := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(saved)


def _saving(trainer: Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
