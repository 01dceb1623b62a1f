"""Autocast and GradScaler on the GPU, with an overflow on one rank."""

import pytest
import torch
from torch import nn

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

DEVICE = "cuda"


@pytest.mark.parametrize(
    "text", ["ddp", "lags(density=0.5)", "adasum", "sgp", "local_sgd(every=2)", "diloco(every=2)"]
)
def test_training_goes_on_after_an_overflow_on_one_rank(text: str) -> None:
    def worker(world: World) -> tuple[float, torch.Tensor]:
        model = nn.Linear(8, 8, device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
        replica = offbeat.replicate(
            model, offbeat.algorithm(text), mesh=world, optimizer=optimizer, scaler=scaler
        )
        for step in range(6):
            with torch.autocast(DEVICE, torch.float16):
                value = model(torch.ones(4, 8, device=DEVICE)).square().mean()
            if (world.rank, step) == (1, 2):
                value = value * torch.inf
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            replica.step()
        replica.finish()
        replica.detach()
        return scaler.get_scale(), model.weight.detach().cpu()

    (scale, first), (other_scale, second) = ThreadWorld(2).run(worker)
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert other_scale == 2.0**9
    # Where gradients are exchanged all ranks see the overflow; otherwise only its own does.
    assert scale == (2.0**9 if text.startswith(("ddp", "lags")) else 2.0**10)
