"""What test_transformers.py asserts, run by two processes; rank 0 prints one JSON line per case."""

import copy
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from report import report
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from offbeat.integrations.transformers import attach
from offbeat.replica.saving.rank_files import RankFiles
from problems import ScheduleFree

FOLDER, PAGE = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])
STEPS, HALF = 20, 10
State = dict[str, torch.Tensor]


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(0, 32, (count, 6), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": row, "labels": row} for row in drawn]


class Watch(TrainerCallback):
    """Notes the parameters of this rank at the end of steps, and those that are evaluated."""

    def __init__(self, stop: int | None = None, fail: int | None = None) -> None:
        self.stop, self.fail = stop, fail
        self.own: State = {}
        self.evaluated: dict[int, State] = {}
        self.logs: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.own = copy.deepcopy(model.state_dict())
        control.should_training_stop |= state.global_step == self.stop
        if state.global_step == self.fail:
            raise KeyboardInterrupt

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.evaluated[state.global_step] = copy.deepcopy(model.state_dict())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.logs.append(dict(logs))


class Overflowing(Trainer):
    """A subclass, as users write them: the loss overflows in the fourth step of rank 1."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.state.global_step == 3 and RANK == 1 else loss


class Switching(Trainer):
    """Has an optimizer that evaluates other parameters than it trains."""

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        self.optimizer = ScheduleFree(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


def make(
    algorithm: str | None,
    name: str,
    watch: Watch,
    kind: type[Trainer] = Trainer,
    dropout: float = 0.1,
    **more: Any,
) -> Trainer:
    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "n_positions": 6, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **config, bos_token_id=0, eos_token_id=0))
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 5,
    }
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(str(FOLDER / name), **(settings | quiet | more))
    trainer = kind(model, args, train_dataset=rows(200), eval_dataset=rows(16), callbacks=[watch])
    if algorithm is not None:
        attach(trainer, algorithm)
    return trainer


def equal(first: State, second: State) -> bool:
    """Return whether the tensors that both have are equal; files leave out tied ones."""
    return all(torch.equal(first[key], second[key]) for key in first.keys() & second.keys())


def flat(state: State) -> list[float]:
    return torch.cat([tensor.flatten()[:5] for tensor in state.values()]).tolist()


def error(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as found:
        return str(found)
    return "none"


def chooses() -> dict[str, Any]:
    """The decisions of ``auto``, before the replica is detached."""

    class Decisions(TrainerCallback):
        steps: list[int]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            replica = ours.callback_handler.callbacks[0].replica
            self.steps = [each["step"] for each in replica.stats().get("auto", [])]

    ours, found = make("auto", "auto", Watch()), Decisions()
    ours.add_callback(found)
    ours.train()
    return {"decisions": found.steps, "end": flat(ours.model.state_dict())}


def ddp() -> dict[str, Any]:
    often = {"eval_strategy": "steps", "eval_steps": 15, "learning_rate": 0.1}
    theirs, watch = Watch(), Watch()
    host = make(None, "host", theirs, Switching, **often)
    host.train()
    ours = make("ddp", "ddp", watch, Switching, **often)
    bytes_of_model = 4 * sum(p.numel() for p in ours.model.parameters())
    ours.train()
    logged = [entry for entry in ours.state.log_history if "loss" in entry]
    return {
        "equal": equal(host.model.state_dict(), ours.model.state_dict()),
        "evaluated": equal(theirs.evaluated[15], watch.evaluated[15]),
        "models_sent_per_step": [entry["mb_sent"] * 1e6 / bytes_of_model for entry in logged],
        "stalled": [entry["seconds_stalled"] for entry in logged],
        "seen": ["mb_sent" in logs for logs in watch.logs if "loss" in logs],
    }


def resume(algorithm: str) -> dict[str, Any]:
    more = {"save_strategy": "steps", "save_steps": HALF}
    whole, half, rest = Watch(), Watch(stop=HALF), Watch()
    first = make(algorithm, f"whole {algorithm}", whole, **more)
    first.train()
    make(algorithm, algorithm, half, **more).train()
    second = make(algorithm, algorithm, rest, **more)
    second.train(resume_from_checkpoint=True)
    return {
        "own": equal(whole.own, rest.own),
        "end": equal(first.model.state_dict(), second.model.state_dict()),
        "at_half": flat(half.own),
        "files": sorted(os.listdir(FOLDER / algorithm / f"checkpoint-{HALF}")),
    }


def interrupted() -> dict[str, Any]:
    """Rank 1 cannot write its file of the second checkpoint, and the run starts again."""
    more = {"save_strategy": "steps", "save_steps": HALF // 2}
    whole, rest = Watch(), Watch()
    make("sgp(overlap=1)", "uninterrupted", whole).train()
    make("sgp(overlap=1)", "interrupted", Watch(stop=HALF // 2), **more).train()
    with patch.object(RankFiles, "write", side_effect=OSError("full") if RANK == 1 else None):
        again = make("sgp(overlap=1)", "interrupted", Watch(stop=HALF), **more)
        refused = error(lambda: again.train(resume_from_checkpoint=True))
    last = make("sgp(overlap=1)", "interrupted", rest, **more)
    last.train(resume_from_checkpoint=True)
    return {
        "refused": refused,
        "equal": equal(whole.own, rest.own),
    }


def overflow(algorithm: str) -> dict[str, Any]:
    trainer = make(algorithm, "overflow", Watch(), Overflowing)
    trainer.model.transformer.wpe.weight.requires_grad_(False)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train()
    return {
        "scale": trainer.accelerator.scaler.get_scale(),
        "steps": trainer.state.global_step,
        "end": flat(trainer.model.state_dict()),
    }


def best() -> dict[str, Any]:
    """The learning rate is too high, so that the best model is not the last."""
    often = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    more = often | {"learning_rate": 0.3, "lr_scheduler_type": "constant"}
    more |= {"dropout": 0.0}  # an evaluation draws from its random numbers
    plain, watch, recording = Watch(), Watch(), FOLDER / "recording"
    make("sgp(overlap=1)", "plain", plain, **(more | {"eval_strategy": "no"})).train()
    with patch.dict(os.environ, OFFBEAT_TELEMETRY=str(recording)):
        trainer = make("sgp(overlap=1)", "best", watch, load_best_model_at_end=True, **more)
        trainer.train()
    eval_losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    evaluated = watch.evaluated[STEPS]
    file = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors"))
    saved = load_file(FOLDER / "best" / f"checkpoint-{STEPS}" / "model.safetensors")
    lines = (recording / f"rank{RANK}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {
        "step": trainer.state.best_global_step,
        "best": equal(file, trainer.model.state_dict()),
        "score_again": trainer.evaluate()["eval_loss"] == trainer.state.best_metric,
        "saved_is_evaluated": equal(saved, evaluated),
        "evaluated": flat(evaluated),
        "own": flat(watch.own),
        "undisturbed": equal(plain.own, watch.own),
        "losses": [event["loss"] for event in events if event["event"] == "step"],
        "heldout": [event["loss"] for event in events if event["event"] == "heldout"],
        "eval_losses": eval_losses,
    }


def again() -> dict[str, Any]:
    watch = Watch(fail=3)
    trainer = make("sgp(overlap=1)", "again", watch)
    interrupted = False
    try:
        trainer.train()
    except KeyboardInterrupt:
        interrupted = True
    dist.barrier()
    plain = not hasattr(trainer.model, "no_sync")
    watch.fail = None
    trainer.train()
    return {
        "interrupted": interrupted,
        "plain": plain and not hasattr(trainer.model, "no_sync"),
        "end": flat(trainer.model.state_dict()),
    }


def errors() -> dict[str, Any]:
    trainer = make("ddp", "errors", Watch())
    twice = error(lambda: attach(trainer, "ddp"))
    trainer.accelerator.state.distributed_type = DistributedType.DEEPSPEED
    sharded = error(lambda: attach(trainer, "ddp"))
    trainer.accelerator.state.distributed_type = DistributedType.MULTI_CPU
    unset = error(lambda: attach(make(None, "errors", Watch())))
    other = make(None, "errors", Watch(), ddp_broadcast_buffers=False)
    buffers = error(lambda: attach(other, "ddp"))
    used = make(None, "errors", Watch())
    used.train()
    attach(used, "ddp")
    wrapped = error(used.train)
    if RANK == 0:
        (FOLDER / "sgp(overlap=1)" / f"checkpoint-{HALF}" / "offbeat-save1-rank1-of-2.pt").unlink()
    dist.barrier()
    resumed = make("sgp(overlap=1)", "errors", Watch())
    folder = str(FOLDER / "sgp(overlap=1)" / f"checkpoint-{HALF}")
    lost = error(lambda: resumed.train(resume_from_checkpoint=folder))
    none = error(lambda: resumed.train(resume_from_checkpoint=True))
    return {
        "twice": twice,
        "sharded": sharded,
        "unset": unset,
        "buffers": buffers,
        "wrapped": wrapped,
        "lost": lost,
        "none": none,
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": ddp,
    "resume sgp": lambda: resume("sgp(overlap=1)"),
    "resume local_sgd": lambda: resume("local_sgd(every=4)"),
    "interrupted": interrupted,
    "overflow sgp": lambda: overflow("sgp(overlap=1)"),
    "overflow ddp": lambda: overflow("ddp"),
    "best": best,
    "chooses": chooses,
    "again": again,
    "errors": errors,
}

if __name__ == "__main__":
    for name, case in CASES.items():
        report(name, case())
    os.chdir(FOLDER)
    names = runpy.run_path(PAGE)  # ends the process group
    if RANK == 0:
        print(json.dumps({"case": "page", "ranks": [{"loss": names["score"]}]}))
