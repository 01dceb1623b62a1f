"""What two ranks do under Lightning: started once by torchrun, one line of JSON for each case."""

import doctest
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins import MixedPrecision
from report import report
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import offbeat
from offbeat.data import ElasticSampler
from offbeat.integrations import lightning as integration
from offbeat.integrations.lightning import OffbeatStrategy
from offbeat.replica.saving.rank_files import RankFiles

STEPS = 10  # of an epoch
FOLDER = Path(sys.argv[1])


class Net(LightningModule):
    """A small regression; ``lr`` differs between optimizers of no case."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Drops(Net):
    """Draws from the global random state, which it seeds for each batch."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        torch.manual_seed(1000 * self.trainer.fit_loop.total_batch_idx + self.global_rank)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(nn.functional.dropout(batch), index)


class Gan(LightningModule):
    """Two networks with an optimizer each, trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, index: int) -> None:
        first, second = self.optimizers()
        noise = batch[:, :2]
        self.toggle_optimizer(second)
        lower = self.critic(batch).mean() - self.critic(self.generator(noise).detach()).mean()
        second.zero_grad()
        self.manual_backward(lower)
        second.step()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        upper = self.critic(self.generator(noise)).mean()
        first.zero_grad()
        self.manual_backward(upper)
        first.step()
        self.untoggle_optimizer(first)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        nets = self.generator, self.critic
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]


class Untoggled(Gan):
    """The same, where the backward of the generator also gives the critic gradients."""

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Leave all parameters trainable."""

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """There is nothing to restore."""


class Values(Callback):
    """Notes this rank's parameters in the middle of validation, and before ``finish``."""

    def __init__(self) -> None:
        self.shown: list[float] = []
        self.last: dict[str, Tensor] = {}

    def on_validation_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
        self.shown.append(digest(module))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.last = copies(module)


class Swapping(Callback):
    """Validates other weights than it trains, and sets the last ones, as callbacks of torch do."""

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.own = copies(module)
        for parameter in module.parameters():
            parameter.data.zero_()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.load_state_dict(self.own)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        for parameter in module.parameters():
            parameter.data.fill_(0.5)


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def digest(module: nn.Module) -> float:
    return sum((i + 1) * p.double().sum().item() for i, p in enumerate(module.parameters()))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def loader(batches: int = STEPS, batch_size: int = 4) -> DataLoader[Tensor]:
    """Batches of each rank's share; the sampler of Lightning divides the rows."""
    rows = torch.randn(2 * batches * batch_size, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=batch_size)


def trainer(strategy: Any, *callbacks: Callback, **more: Any) -> Trainer:
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    at = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy}
    return Trainer(
        **at,
        callbacks=[*callbacks],
        **quiet,
        **{"max_epochs": 2, "enable_checkpointing": saves, **more},
    )


def checkpoints(name: str, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(FOLDER / name, "{epoch}", save_top_k=-1, **settings)


def equals_ddp() -> dict[str, Any]:
    found = []
    for strategy in ("ddp", OffbeatStrategy("ddp")):
        model = Net()
        values = Values()
        run = trainer(strategy, values, Swapping(), accumulate_grad_batches=2, max_epochs=4)
        run.fit(model, loader(), loader(2))
        found.append(values.last)
    return {"equal": same(*found), "steps": run.global_step, "wrapped": strategy.model is not model}


def swapped_last() -> dict[str, Any]:
    """What a callback sets at the end stays, without what was in flight."""
    model = Net()
    trainer(OffbeatStrategy("sgp(overlap=1)"), Swapping()).fit(model, loader(), loader(2))
    return {"left": sorted({x for p in model.parameters() for x in p.flatten().tolist()})}


def gan_equals_ddp() -> dict[str, Any]:
    found = []
    for strategy in ("ddp_find_unused_parameters_true", OffbeatStrategy("ddp")):
        model = Gan()
        start = copies(model)
        trainer(strategy).fit(model, loader())
        found.append(copies(model))
    moved = [name for name in start if not start[name].equal(found[0][name])]
    return {"equal": same(*found), "moved": len(moved)}


def gan_by_gossip() -> dict[str, Any]:
    """Parameters of both networks differ between exchanges, and agree in the end."""
    model = Gan()
    values = Values()
    run = trainer(OffbeatStrategy("sgp(overlap=1)"), values, log_every_n_steps=2)
    run.fit(model, loader())
    own = sum(p.double().sum().item() for p in values.last.values())
    sent = run.logged_metrics["mb_sent"].item() * 1e6 / sum(p.nbytes for p in model.parameters())
    return {"own": own, "end": digest(model), "models": sent}


def chooses() -> dict[str, Any]:
    """The decisions of ``auto``, before the replica is detached."""

    class Decisions(Callback):
        steps: list[int]

        def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
            (replica,) = trainer.strategy.replicas.each
            self.steps = [decision["step"] for decision in replica.stats()["auto"]]

    found, model = Decisions(), Net()
    trainer(OffbeatStrategy("auto"), found).fit(model, loader())
    return {"decisions": found.steps, "end": digest(model)}


def waits_for_rank_0(text: str) -> dict[str, Any]:
    """How many collectives of Lightning's own an epoch has."""
    original, calls = dist.broadcast, list[Any]()

    def broadcast(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return original(*args, **more)

    run = trainer(OffbeatStrategy(text), max_epochs=1)
    with patch.object(dist, "broadcast", broadcast):
        run.fit(Net(), loader())
    return {"broadcasts": len(calls), "batches": run.global_step}


def resumed(text: str) -> dict[str, Any]:
    """Two epochs at once, and one after the other in new objects, saved during validation."""
    ends, shown, saved = [], [], None
    for path in (None, f"{FOLDER}/{text}/epoch=0.ckpt"):
        model, values = Drops(), Values()
        keeps = checkpoints(text, monitor="val_loss") if path is None else ModelCheckpoint
        callbacks = [values, keeps] if path is None else [values]
        run = trainer(OffbeatStrategy(text), *callbacks, num_sanity_val_steps=0)
        run.fit(model, loader(), loader(2), ckpt_path=path)
        ends.append(values.last)
        shown.append(values.shown)
        saved = saved or torch.load(f"{FOLDER}/{text}/epoch=0.ckpt", weights_only=True)
    average = Net()
    average.load_state_dict(saved["state_dict"])
    return {
        "equal": same(*ends),
        "shown": shown[0][0],  # during the first validation
        "saved": digest(average),
        "own": sum(p.double().sum().item() for p in ends[0].values()),
        "later": shown[0][2:] == shown[1],
        "files": sorted(os.listdir(f"{FOLDER}/{text}/epoch=0.ckpt.offbeat")),
    }


class Draws(Net):
    """Trains on what an ElasticSampler gives this rank, and notes it by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.drawn = torch.randn(80, 4), dict[int, list[int]]()

    def train_dataloader(self) -> DataLoader[int]:
        (replica,) = self.trainer.strategy.replicas.each
        self.sampler = ElasticSampler(80, 4, replica, prefetch=1)
        return DataLoader(range(80), batch_sampler=self.sampler)

    def on_train_epoch_start(self) -> None:
        self.sampler.set_epoch(self.current_epoch)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.drawn.setdefault(self.current_epoch, []).extend(batch.tolist())
        return super().training_step(self.rows[batch], index)


def samples_resumed(until: str) -> dict[str, Any]:
    """What two epochs of ten steps draw, in or after the first of which a run resumes."""
    in_epoch = until == "step"
    end = {"max_steps": 4} if in_epoch else {"max_epochs": 1}
    saved = checkpoints(f"samples-{until}", every_n_train_steps=4 if in_epoch else None)
    own = {"use_distributed_sampler": False}
    before, after = Draws(), Draws()
    trainer(OffbeatStrategy("ddp"), saved, **end, **own).fit(before)
    trainer(OffbeatStrategy("ddp"), **own).fit(after, ckpt_path=saved.best_model_path)
    first = before.drawn[0] + after.drawn.get(0, [])
    return {"first": first, "second": after.drawn.get(1, [])}


def gan_resumed() -> dict[str, Any]:
    ends = []
    for path in (None, FOLDER / "gan" / "epoch=0.ckpt"):
        values = Values()
        callbacks = [values, checkpoints("gan")] if path is None else [values]
        trainer(OffbeatStrategy("sgp(overlap=1)"), *callbacks).fit(
            Untoggled(), loader(), ckpt_path=path
        )
        ends.append(values.last)
    return {"equal": same(*ends)}


def skipped_step() -> dict[str, Any]:
    """The gradient of rank 1 overflows once: it alone skips its optimizer's step."""

    class Overflow(Net):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            factor = float("inf") if index == 3 and self.global_rank == 1 else 1.0
            return super().training_step(batch, index) * factor

    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    model = Overflow()
    run = trainer(OffbeatStrategy("sgp(overlap=1)"), plugins=[precision])
    run.fit(model, loader())
    return {"scale": scaler.get_scale(), "end": digest(model)}


def logged() -> dict[str, Any]:
    model = Net()
    run = trainer(OffbeatStrategy("local_sgd(every=2)"), log_every_n_steps=1)
    run.fit(model, loader())
    bars = {name for name in run.progress_bar_metrics if name in ("seconds_stalled", "mb_sent")}
    model_bytes = sum(p.nbytes for p in model.parameters())
    return {
        "bars": sorted(bars),
        "models": run.logged_metrics["mb_sent"].item() * 1e6 / model_bytes,
    }


def saved_while_accumulating() -> dict[str, Any]:
    """Validation and a checkpoint after 3, 6 and 9 of 10 micro-batches, two for each step."""
    folder = FOLDER / "accumulating"
    often = ModelCheckpoint(folder, "{step}-{val_loss:.9f}", monitor="val_loss", save_top_k=-1)
    more = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 1}
    model = Net()
    trainer(OffbeatStrategy("sgp"), often, **more).fit(model, loader(), loader(2))
    paths = sorted(folder.glob("*.ckpt"))
    again = trainer(OffbeatStrategy("sgp"), max_epochs=2)
    again.fit(Net(), loader(), ckpt_path=paths[0])
    return {"saved": len(paths), "steps": again.global_step}


def last_is_a_link() -> dict[str, Any]:
    folder = FOLDER / "link"
    one = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1, save_last="link")
    trainer(OffbeatStrategy("sgp"), one).fit(Net(), loader(), loader(2))
    dist.barrier()
    if dist.get_rank() == 1:  # the first of another node, before rank 0 has removed the link
        with patch.object(OffbeatStrategy, "local_rank", 0):
            trainer(OffbeatStrategy("sgp")).strategy.remove_checkpoint(folder / "last.ckpt")
    dist.barrier()
    found = sorted(path.name for path in folder.iterdir())
    run = trainer(OffbeatStrategy("sgp"), max_epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Net(), loader(), ckpt_path=folder / "last.ckpt")
    unknown = [str(w.message) for w in caught if "of another strategy" in str(w.message)]
    return {"found": found, "unknown": unknown, "steps": run.global_step}


def from_a_run_of_ddp() -> dict[str, Any]:
    trainer("ddp", checkpoints("of-ddp"), max_epochs=1).fit(Net(), loader())
    run = trainer(OffbeatStrategy("sgp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Net(), loader(), ckpt_path=FOLDER / "of-ddp" / "epoch=0.ckpt")
    unknown = [w for w in caught if "of another strategy" in str(w.message)]
    return {"warned": len(unknown), "steps": run.global_step}


def missing_file() -> dict[str, Any]:
    trainer(OffbeatStrategy("sgp"), checkpoints("missing"), max_epochs=1).fit(Net(), loader())
    path = FOLDER / "missing" / "epoch=0.ckpt"
    dist.barrier()
    if dist.get_rank() == 0:
        Path(f"{path}.offbeat", "offbeat-save1-rank1-of-2.pt").unlink()
    dist.barrier()
    try:
        trainer(OffbeatStrategy("sgp")).fit(Net(), loader(), ckpt_path=path)
    except ValueError as error:
        return {"error": str(error)}
    return {}


def overwritten(where: str) -> dict[str, Any]:
    """The second save to one path fails on one rank; the checkpoint is still the first."""
    path, ends = FOLDER / f"overwritten-{where}" / "v1.0.ckpt", []
    for resumes in (False, True):
        values = Values()
        run = trainer(OffbeatStrategy("sgp(overlap=1)"), values)
        run.fit(Net(), loader(), ckpt_path=path if resumes else None)
        ends.append(values.last)
        if not resumes:
            error = _save_twice(path, where)
    return {
        "equal": same(*ends),
        "error": error,
        "files": len([*Path(f"{path}.offbeat").iterdir()]),
    }


def _save_twice(path: Path, where: str) -> str:
    """Save after one epoch and, in part, after another; return why not all of it."""
    run = trainer(OffbeatStrategy("sgp(overlap=1)"), _SaveTo(path, where), max_epochs=3)
    try:
        run.fit(Net(), loader())
    except ValueError as error:
        return str(error)
    except OSError as error:
        return repr(error)
    return ""


class _SaveTo(Callback):
    """Saves after each epoch to one path; the second time, one rank fails."""

    def __init__(self, path: Path, where: str) -> None:
        self.path, self.where = path, where

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        fails = trainer.current_epoch == 1
        host = type(trainer.strategy.checkpoint_io)
        owner, name, rank = (RankFiles, "write", 1)
        if self.where == "host":
            owner, name, rank = (host, "save_checkpoint", 0)
        failing = fails and trainer.global_rank == rank
        with patch.object(owner, name, side_effect=OSError("full")) if failing else nullcontext():
            trainer.save_checkpoint(self.path)


def an_exception_on_all_ranks() -> dict[str, Any]:
    """A checkpoint is saved by the callback, without an average; the model can train again."""

    class Fails(Net):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if index == 3:
                raise KeyError("on purpose")
            return super().training_step(batch, index)

    model, folder = Fails(), FOLDER / "exception"
    run = trainer(OffbeatStrategy("sgp"), OnExceptionCheckpoint(folder))
    try:
        run.fit(model, loader())
    except KeyError:
        saved = torch.load(folder / "on_exception.ckpt", weights_only=True)["global_step"]
    plain = Net()
    plain.net = model.net
    trainer(OffbeatStrategy("sgp"), max_epochs=1).fit(plain, loader())
    return {"saved": saved, "end": digest(plain)}


def an_exception_on_one_rank() -> dict[str, Any]:
    """It saves a checkpoint without the other, which does not wait for it."""

    class Fails(Net):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if index == 3 and self.global_rank == 1:
                raise KeyError("on purpose")
            return super().training_step(batch, index)

    run = trainer(OffbeatStrategy("sgp"), OnExceptionCheckpoint(FOLDER / "one"))
    try:
        run.fit(Fails(), loader())
    except (KeyError, offbeat.PeerLost) as error:
        return {"error": repr(error)}
    return {}


def by_name() -> dict[str, Any]:
    texts = []
    os.environ.pop("OFFBEAT_ALGORITHM", None)
    try:
        trainer("offbeat")
    except ValueError as error:
        texts.append(str(error))
    try:
        OffbeatStrategy("sgp", find_unused_parameters=True)
    except TypeError as error:
        texts.append(str(error))
    os.environ["OFFBEAT_ALGORITHM"] = "local_sgd(every=4)"
    run = trainer("offbeat", max_epochs=1)
    run.fit(Net(), loader())
    return {
        "errors": texts,
        "algorithm": repr(run.strategy.replicas.algorithm),
        "steps": run.global_step,
    }


def from_yaml() -> dict[str, Any]:
    """The command line of a YAML file, and that of the file which the first run has saved."""

    class Fed(Net):
        def train_dataloader(self) -> DataLoader[Tensor]:
            return loader()

    folder = FOLDER / "yaml"
    written, saved = FOLDER / "fit.yaml", folder / "config.yaml"
    written.write_text(YAML.format(folder))
    found = []
    for path, saves in ((written, SaveConfigCallback), (saved, None)):
        arguments = ["fit", "--config", str(path)]
        run = LightningCLI(Fed, save_config_callback=saves, args=arguments).trainer
        found.append([repr(run.strategy.replicas.algorithm), run.global_step])
    return {"found": found, "timeout": run.strategy._timeout.total_seconds()}


YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {}
  strategy:
    class_path: offbeat.integrations.lightning.OffbeatStrategy
    init_args:
      algorithm: local_sgd(every=4)
      timeout: "0:10:00"
"""


def shared_parameters() -> dict[str, Any]:
    class Twice(Gan):
        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    try:
        trainer(OffbeatStrategy("sgp")).fit(Twice(), loader())
    except ValueError as error:
        return {"error": str(error)}
    return {}


def fabric() -> dict[str, Any]:
    """The loop of the page on Lightning."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = Net().net.to(fabric.device)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
    replica = offbeat.replicate(model, offbeat.sgp(), optimizer=optimizer)
    for batch in fabric.setup_dataloaders(loader()):
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    replica.finish()
    steps = replica.stats()["step"]
    replica.detach()
    return {"steps": steps, "end": digest(model)}


class Unequal(Net):
    """Ranks have 100, 70 and 31 batches; a stream does not say so."""

    def __init__(self, is_stream: bool) -> None:
        super().__init__()
        self.is_stream, self.seen = is_stream, list[int]()

    def train_dataloader(self) -> Any:
        rows = torch.arange(4 * (100, 70, 31)[self.global_rank]).view(-1, 4)
        batches = [row.float() / 400 for row in rows.unsqueeze(1)]
        own = Stream(batches) if self.is_stream else batches
        return self.trainer.strategy.uneven(own)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        weighting = self.trainer.strategy.replicas.each[0].weighting
        self.seen.append(round(batch[0, 0].item() * 100) * (1 if weighting.now else -1))
        return super().training_step(batch, index)


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def uneven(text: str, kind: str) -> dict[str, Any]:
    module = Unequal(kind == "stream")
    fitted = trainer(OffbeatStrategy(text, weighted=True), max_epochs=2)
    fitted.fit(module)
    own = [*range((100, 70, 31)[module.global_rank])]
    expected = 2 * [*own, *[-own[-1]] * (100 - len(own))]
    return {"steps": fitted.global_step, "seen": module.seen == expected, "end": digest(module)}


def page() -> dict[str, Any]:
    """The script of the page on Lightning, in a folder of its own."""
    os.chdir(FOLDER)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        found = runpy.run_path(sys.argv[2], run_name="__main__")
    fitted = found["trainer"]
    return {"steps": fitted.global_step, "loss": fitted.callback_metrics["val_loss"].item()}


def doctests() -> dict[str, Any]:
    return dict(doctest.testmod(integration)._asdict())


CASES: tuple[tuple[Callable[..., dict[str, Any]], tuple[str, ...]], ...] = (
    (equals_ddp, ()),
    (gan_equals_ddp, ()),
    (gan_by_gossip, ()),
    (swapped_last, ()),
    (gan_resumed, ()),
    (chooses, ()),
    (waits_for_rank_0, ("local_sgd(every=1000)",)),
    (waits_for_rank_0, ("ddp",)),
    (resumed, ("sgp(overlap=1)",)),
    (resumed, ("local_sgd(every=4)",)),
    (samples_resumed, ("step",)),
    (samples_resumed, ("epoch",)),
    (skipped_step, ()),
    (logged, ()),
    (saved_while_accumulating, ()),
    (last_is_a_link, ()),
    (from_a_run_of_ddp, ()),
    (missing_file, ()),
    (overwritten, ("ranks",)),
    (overwritten, ("host",)),
    (an_exception_on_all_ranks, ()),
    (an_exception_on_one_rank, ()),
    (by_name, ()),
    (from_yaml, ()),
    (shared_parameters, ()),
    (fabric, ()),
    (doctests, ()),
    (page, ()),
)
OF_THREE = (
    (uneven, ("ddp", "sized")),
    (uneven, ("ddp", "stream")),
    (uneven, ("local_sgd(every=8)", "stream")),
)


def main() -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for case, arguments in OF_THREE if os.environ["WORLD_SIZE"] == "3" else CASES:
        name = case.__name__ + "".join(f"[{a}]" for a in arguments)
        report(name, case(*arguments))


if __name__ == "__main__":
    main()
