"""Workers of an elastic run of Lightning; see ``killed_and_joined``."""

from pathlib import Path
from typing import Any

import killed_and_joined
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offbeat.integrations.lightning import OffbeatStrategy

BATCHES = 8  # of an epoch, on each rank


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.scores: dict[int, float] = {}  # by epoch

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("train", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("score", self.net(batch).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.scores[self.current_epoch] = self.trainer.callback_metrics["score"].item()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


class Watch(Callback):
    """Ends the run alike on all ranks, and notes what this one ends with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        killed_and_joined.tell(self.folder, trainer.strategy.replicas.each[0])

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.should_stop |= killed_and_joined.is_over(trainer.strategy.replicas.each[0])

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        (replica,) = trainer.strategy.replicas.each
        (optimizer,), (scheduler,) = trainer.optimizers, trainer.lr_scheduler_configs
        first = next(iter(optimizer.state.values()))
        self.found = {
            "rank": replica.world.rank,
            "joined": [join["step"] for join in replica.joined],
            "lost": [loss["rank"] for loss in replica.lost],
            "alike": {
                "steps": replica.steps,
                "global_step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "batches": trainer.fit_loop.total_batch_idx,
                "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
                "lr": scheduler.scheduler.get_last_lr(),
                "scheduled": scheduler.scheduler.last_epoch,
                "adam": first["step"].item(),
                "moment": first["exp_avg"].tolist(),
                "model": [t.tolist() for t in module.state_dict().values()],
                "best": trainer.checkpoint_callback.best_model_path,
                "last_score": trainer.callback_metrics["score"].item(),
            },
        }


def work(folder: Path, number: int) -> dict[str, Any]:
    watch, net = Watch(folder), Net()
    rows = torch.randn(3 * 4 * BATCHES, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=OffbeatStrategy("ddp", elastic=True),
        callbacks=[watch, ModelCheckpoint(monitor="score", save_top_k=1)],
        max_epochs=1000,
        default_root_dir=str(folder),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=16))
    saved = sorted(path.name for path in Path(watch.found["alike"]["best"]).parent.iterdir())
    return {**watch.found, "saved": saved, "scores": len(net.scores)}
