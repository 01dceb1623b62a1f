"""Workers of an elastic run of the Trainer; see ``killed_and_joined``."""

from pathlib import Path
from typing import Any

import killed_and_joined
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from offbeat.integrations.transformers import attach

BATCHES = 8  # of an epoch, on each rank; two for each step


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(0, 32, (count, 6), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": row, "labels": row} for row in drawn]


class Watch(TrainerCallback):
    """Ends the run alike on all ranks, and notes what this one ends with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}
        self.replica: Any = None
        self.saves = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= killed_and_joined.is_over(self.replica())
        killed_and_joined.tell(self.folder, self.replica())

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.found["score"] = metrics["eval_loss"]

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **more: Any
    ) -> None:
        first = next(iter(optimizer.state.values()))
        scheduler = more["lr_scheduler"]
        self.found |= {
            "first": state.is_world_process_zero,
            "alike": {
                "global_step": state.global_step,
                "epoch": state.epoch,
                "lr": [group["lr"] for group in optimizer.param_groups],
                "scheduled": scheduler.last_epoch,
                "adam": first["step"].item(),
                "moment": first["exp_avg"].flatten()[:5].tolist(),
                "model": [t.flatten()[:5].tolist() for t in model.state_dict().values()],
                "score": self.found.pop("score"),
            },
        }


def work(folder: Path, number: int) -> dict[str, Any]:
    torch.manual_seed(3)
    watch = Watch(folder)
    sizes = {"vocab_size": 32, "n_positions": 6, "n_embd": 16, "n_layer": 1, "n_head": 2}
    args = TrainingArguments(
        str(folder / "output"),
        num_train_epochs=1000,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        save_total_limit=2,
        logging_steps=5,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    data = {"train_dataset": rows(3 * 2 * BATCHES), "eval_dataset": rows(16)}
    trainer = Trainer(model, args, **data, callbacks=[watch])
    attached = attach(trainer, "ddp", elastic=True)
    replicas: list[Any] = []

    def replica() -> Any:
        replicas[:] = [attached.replica]
        return attached.replica

    watch.replica = replica
    trainer.train()
    (last,) = replicas
    steps = {"steps": last.steps, "lost": [loss["rank"] for loss in last.lost]}
    steps |= {"joined": [join["step"] for join in last.joined], "rank": last.world.rank}
    saved = sorted(path.name for path in (folder / "output").iterdir())
    return {**watch.found, **steps, "saved": saved}
