"""What test_accelerate.py asserts, run by two processes; rank 0 prints one JSON line per case."""

import copy
import json
import os
import pickle
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType
from report import report
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import offbeat
from offbeat.integrations.accelerate import newest_checkpoint, prepare
from offbeat.replica.saving.rank_files import RankFiles

FOLDER, PAGE = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])
STEPS, ACCUMULATE, HALF = 20, 2, 10


def objects() -> tuple[Any, ...]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    x = torch.randn(8 * STEPS * ACCUMULATE, 8)
    # With a generator of its own, the start of an epoch draws nothing from the one of dropout.
    rows = list(zip(x, x.sum(1, keepdim=True), strict=True))
    loader = DataLoader(rows, batch_size=4, generator=torch.Generator())
    return model, optimizer, loader, scheduler


def train(
    algorithm: str | None,
    save: Path | None = None,
    resume: Path | None = None,
    steps: int = STEPS,
    overflow: int | None = None,
) -> SimpleNamespace:
    """Train as a script of Accelerate does; without an algorithm by its own DDP."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    if overflow is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    if algorithm is None:
        replica, (model, optimizer, loader, scheduler) = None, accelerator.prepare(*objects())
    else:
        replica, model, optimizer, loader, scheduler = prepare(
            accelerator, *objects(), algorithm=algorithm
        )
    torch.manual_seed(RANK)
    done, skips, average, hooked = 0, 0, None, []
    accelerator.register_save_state_pre_hook(
        lambda models, *_: hooked.append(copy.deepcopy(models[0].state_dict()))
    )
    if resume is not None:
        accelerator.load_state(resume)
        loader, done = accelerator.skip_first_batches(loader, HALF * ACCUMULATE), HALF
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            if accelerator.sync_gradients and done == overflow and RANK == 1:
                loss = loss * float("inf")
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            skips += optimizer.step_was_skipped
            if done == HALF and save is not None:
                accelerator.save_state(save)
                with replica.consensus():
                    average = copy.deepcopy(model.state_dict())
            if done == steps:
                break
    bare = accelerator.unwrap_model(model)
    own, stats = copy.deepcopy(bare.state_dict()), replica.stats() if replica else {}
    if replica is not None:
        replica.finish()
        replica.detach()
    return SimpleNamespace(
        own=own, end=bare.state_dict(), skips=skips, stats=stats, average=average, hooked=hooked
    )


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def flat(state: dict[str, torch.Tensor]) -> list[float]:
    return torch.cat([tensor.flatten() for tensor in state.values()]).tolist()


def error(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as found:
        return str(found)
    return "none"


def ddp() -> dict[str, Any]:
    host, ours = train(None), train("ddp")
    numel = sum(tensor.numel() for tensor in ours.own.values())
    sent = ours.stats["total"]["bytes_sent"] / STEPS / 4 / numel
    return {"equal": equal(host.own, ours.own), "models_sent_per_step": sent}


def chooses() -> dict[str, Any]:
    found = train("auto")
    return {"decisions": [each["step"] for each in found.stats["auto"]], "end": flat(found.end)}


def resume(algorithm: str) -> dict[str, Any]:
    folder = FOLDER / algorithm
    whole = train(algorithm)
    half = train(algorithm, save=folder, steps=HALF)
    resumed = train(algorithm, resume=folder)
    return {
        "own": equal(whole.own, resumed.own),
        "end": equal(whole.end, resumed.end),
        "average_is_saved": equal(half.average, load_file(folder / "model.safetensors")),
        "average_is_hooked": equal(half.average, half.hooked[0]),
        "at_half": flat(half.own)[:3],
        "files": sorted(path.name for path in folder.iterdir()),
    }


def overflow(algorithm: str) -> dict[str, Any]:
    run = train(algorithm, overflow=3)
    return {"skips": run.skips, "steps": run.stats["step"], "end": flat(run.end)}


def gan_run(algorithm: str | None, folder: Path | None, resumed: bool) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5)
    nets = nn.Linear(4, 1), nn.Linear(2, 4)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    replicas = []
    if algorithm is None:
        d, g, optimizer_d, optimizer_g = accelerator.prepare(*nets, *optimizers)
    else:
        r, d, optimizer_d = prepare(accelerator, nets[0], optimizers[0], algorithm=algorithm)
        s, g, optimizer_g = prepare(accelerator, nets[1], optimizers[1], algorithm=algorithm)
        replicas = [r, s]
    torch.manual_seed(RANK)
    if resumed:
        accelerator.load_state(folder)
    for step in range(5 if resumed else 0, 10):
        real, fake = torch.randn(8, 4), g(torch.randn(8, 2)).detach()
        accelerator.backward(d(fake).square().mean() + (d(real) - 1).square().mean())
        optimizer_d.step()
        optimizer_d.zero_grad()
        with accelerator.no_sync(d):  # its gradients are discarded
            accelerator.backward((d(g(torch.randn(8, 2))) - 1).square().mean())
        optimizer_g.step()
        optimizer_g.zero_grad()
        optimizer_d.zero_grad()
        if step == 4 and folder is not None and not resumed:
            accelerator.save_state(folder)
    found = {f"{i}.{k}": v.clone() for i, n in enumerate(nets) for k, v in n.state_dict().items()}
    for replica in replicas:
        replica.detach()
    return found


def gan() -> dict[str, Any]:
    whole = gan_run("sgp(overlap=1)", FOLDER / "gan", resumed=False)
    return {
        "ddp": equal(gan_run(None, None, False), gan_run("ddp", None, False)),
        "resumed": equal(whole, gan_run("sgp(overlap=1)", FOLDER / "gan", resumed=True)),
        "differ": flat(whole)[:3],
    }


def copies() -> dict[str, Any]:
    """A copy of a model that is being trained, for instance its moving average, is plain."""
    accelerator = Accelerator(cpu=True)
    replica, model, *_ = prepare(accelerator, *objects(), algorithm="sgp")
    found = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    plain = [isinstance(other.no_sync(), nullcontext) for other in found]
    stepped = replica.steps
    replica.detach()
    return {"plain": plain, "steps": stepped}


def again() -> dict[str, Any]:
    """Two trainings with one accelerator, as in cross-validation."""
    accelerator = Accelerator(cpu=True)
    for fold in ("first", "second"):
        replica, model, optimizer, *_ = prepare(accelerator, *objects(), algorithm="sgp")
        accelerator.backward(model(torch.randn(2, 8)).sum())
        optimizer.step()
        accelerator.save_state(FOLDER / fold)
        replica.detach()
        accelerator.free_memory()
    return {"same_files": os.listdir(FOLDER / "first") == os.listdir(FOLDER / "second")}


def interrupted() -> dict[str, Any]:
    """Rank 1 cannot write its file of the third checkpoint; the host has written all of its own."""
    folder = FOLDER / "interrupted"
    before = newest_checkpoint(folder)
    train("sgp(overlap=1)", save=folder / "v1.0_9", steps=HALF)
    train("sgp(overlap=1)", save=folder / "v1.0_10", steps=HALF)
    with patch.object(RankFiles, "write", side_effect=OSError("full") if RANK == 1 else None):
        refused = error(lambda: train("sgp(overlap=1)", save=folder / "v1.0_11", steps=HALF))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        newest = newest_checkpoint(folder)
        train("sgp(overlap=1)", save=folder / "v1.0_10", steps=HALF)
    said = [str(w.message) for w in caught]
    return {
        "before": before,
        "refused": refused,
        "host": (folder / "v1.0_11" / "model.safetensors").exists(),
        "newest": newest.name,
        "incomplete": sum("['v1.0_11'] are incomplete" in text for text in said),
        "overwrites": sum("overwrites the files in" in text for text in said),
        "resumed": equal(train("sgp(overlap=1)").own, train("sgp(overlap=1)", resume=newest).own),
    }


def errors() -> dict[str, Any]:
    model, optimizer, *_ = objects()
    other, other_optimizer, *_ = objects()
    accelerator = Accelerator(cpu=True)
    pair = accelerator, model, optimizer
    several = error(lambda: prepare(*pair, other, other_optimizer, algorithm="ddp"))
    accelerator.state.distributed_type = DistributedType.FSDP
    sharded = error(lambda: prepare(*pair, algorithm="ddp"))
    accelerator.state.distributed_type = DistributedType.MULTI_CPU
    accelerator.ddp_handler = DistributedDataParallelKwargs(broadcast_buffers=False)
    wrapped = error(lambda: prepare(*pair, algorithm="ddp"))
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    os.environ["OFFBEAT_ALGORITHM"] = "local_sgd(every=3)"
    replica = prepare(*pair)[0]
    from_environment = str(replica.algorithm)
    del os.environ["OFFBEAT_ALGORITHM"]
    unset = error(lambda: prepare(accelerator, other, other_optimizer))

    def fill(*_: object) -> None:
        if RANK == 0:
            raise OSError("no space left")

    hook = accelerator.register_save_state_pre_hook(fill)
    unwritten = error(lambda: accelerator.save_state(FOLDER / "unwritten"))
    hook.remove()
    accelerator.register_for_checkpointing(replica)
    registered = error(lambda: accelerator.save_state(FOLDER / "registered"))
    replica.detach()
    plain = Accelerator(cpu=True)
    replica = offbeat.replicate(other, offbeat.sgp())
    other(torch.randn(2, 8)).sum().backward()
    other_optimizer.step()
    replica.step()
    plain.register_for_checkpointing(replica)
    plain.save_state(FOLDER / "registered")
    dist.barrier()
    loaded = error(lambda: plain.load_state(FOLDER / "registered"))
    replica.detach()
    if RANK == 0:
        (FOLDER / "sgp(overlap=1)" / "offbeat-save1-rank1-of-2.pt").unlink()
    dist.barrier()
    lost = error(lambda: train("sgp(overlap=1)", resume=FOLDER / "sgp(overlap=1)"))
    return {
        "several": several,
        "sharded": sharded,
        "wrapped": wrapped,
        "from_environment": from_environment,
        "unset": unset,
        "unwritten": unwritten,
        "registered": registered,
        "loaded": loaded,
        "lost": lost,
    }


def uneven(text: str) -> dict[str, Any]:
    """Ranks have 100, 70 and 31 batches."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, *_ = objects()
    rows = torch.randn((100, 70, 31)[RANK], 8, generator=torch.Generator().manual_seed(RANK))
    replica, model, optimizer = prepare(
        accelerator, model, optimizer, algorithm=text, weighted=True
    )
    batches = 0
    for x in replica.uneven(DataLoader(list(rows), batch_size=1)):
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        batches += 1
    replica.finish()
    end = sum(p.double().sum().item() for p in model.parameters())
    steps = replica.steps
    replica.detach()
    return {"batches": batches, "steps": steps, "end": end}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": ddp,
    "resume sgp": lambda: resume("sgp(overlap=1)"),
    "resume local_sgd": lambda: resume("local_sgd(every=4)"),
    "overflow sgp": lambda: overflow("sgp(overlap=1)"),
    "overflow ddp": lambda: overflow("ddp"),
    "gan": gan,
    "chooses": chooses,
    "copies": copies,
    "again": again,
    "interrupted": interrupted,
    "errors": errors,
}
OF_THREE: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": lambda: uneven("ddp"),
    "local_sgd": lambda: uneven("local_sgd(every=8)"),
}


def main() -> None:
    cases = OF_THREE if os.environ["WORLD_SIZE"] == "3" else CASES
    for name, case in cases.items():
        report(name, case())
    if cases is OF_THREE:
        return
    os.chdir(FOLDER)
    names = runpy.run_path(PAGE)  # ends the process group
    if RANK == 0:
        print(json.dumps({"case": "page", "ranks": [{"loss": names["score"]}]}))


if __name__ == "__main__":
    main()
