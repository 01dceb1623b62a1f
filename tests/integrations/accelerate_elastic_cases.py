"""Workers of an elastic run of Accelerate; see ``killed_and_joined``."""

from pathlib import Path
from typing import Any

import killed_and_joined
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from offbeat.integrations.accelerate import prepare


def work(folder: Path, number: int) -> dict[str, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    rows = torch.arange(48.0).reshape(12, 4) / 48
    replica, model, optimizer, loader = prepare(
        accelerator, model, optimizer, DataLoader(rows, batch_size=2), algorithm="ddp", elastic=True
    )
    replica.register("schedule", schedule)
    if replica.joined:  # the others do it after the step in which this rank has joined
        schedule.step()
    mine = sorted({batch[0, 0].item() * 12 for batch in loader})
    batches = iter(())
    while not killed_and_joined.is_over(replica):
        if (batch := next(batches, None)) is None:
            batches = iter(loader)
            batch = next(batches)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        killed_and_joined.tell(folder, replica)
    before = replica.stats()["total"]["bytes_sent"]
    with accelerator.no_sync(model):
        accelerator.backward(model(rows[:2]).square().mean())
    sent = replica.stats()["total"]["bytes_sent"] - before
    accelerator.backward(model(rows[:2]).square().mean())
    optimizer.step()
    schedule.step()
    accelerator.save_state(str(folder / "checkpoint"))
    replica.finish()
    found = {
        "rank": replica.world.rank,
        "lost": [loss["rank"] for loss in replica.lost],
        "joined": [join["step"] for join in replica.joined],
        "first": accelerator.is_main_process,
        "sent in no_sync": sent,
        "mine": [round(row) for row in mine],
        "alike": {
            "steps": replica.steps,
            "lr": schedule.get_last_lr(),
            "rate": optimizer.param_groups[0]["lr"],
            "model": [p.tolist() for p in model.parameters()],
        },
    }
    replica.detach()
    return {**found, "saved": sorted(path.name for path in (folder / "checkpoint").iterdir())}
