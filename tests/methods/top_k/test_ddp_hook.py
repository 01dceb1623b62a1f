"""LAGS as a hook of torch's DistributedDataParallel, which owns buckets and hooks."""

import io
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import offbeat
from offbeat.methods.top_k.ddp_hook import LagsState, lags_hook
from offbeat.testing import ThreadWorld
from offbeat.transport.links import Links
from offbeat.transport.world import World

DENSITY = 0.05


def net(dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)]
    model = nn.Sequential(*layers).to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    return model


def error(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=generator).to(next(model.parameters()).dtype)
    result: Tensor = (model(x) - x[:, :3].sin()).square().mean()
    return result


class Host:
    """A program with its own wrapper, in buckets of a kilobyte."""

    def __init__(
        self, world: World, density: float = DENSITY, dtype: torch.dtype = torch.float64
    ) -> None:
        self.links, self.rank = Links.connect(world), world.rank
        world = self.links.open("world")
        assert world is not None
        self.model = net(dtype)
        self.optimizer = SGD(self.model.parameters(), lr=0.2)
        # One group for the wrapper, torch's own collectives included, as in a real program.
        self.group = world.process_group
        self.ddp = DistributedDataParallel(
            self.model, process_group=self.group, bucket_cap_mb=1e-3, find_unused_parameters=False
        )
        self.state = LagsState(
            self.ddp, density, optimizer=self.optimizer, process_group=self.group
        )
        self.buckets: set[int] = set()
        self.ddp.register_comm_hook(self.state, self.hook)

    def hook(self, state: LagsState, bucket: dist.GradBucket) -> Future[Tensor]:
        self.buckets.add(bucket.index())
        return lags_hook(state, bucket)

    def train(self, steps: range, spoil: int | None = None) -> None:
        for step in steps:
            time.sleep(0.01 * ((self.rank + step) % 2))  # ranks are never together
            loss = error(self.ddp, self.rank, step)
            (loss * float("inf") if step == spoil and self.rank == 1 else loss).backward()
            if step != spoil:
                self.optimizer.step()
            else:
                assert any(not p.grad.isfinite().all() for p in self.model.parameters())
            self.optimizer.zero_grad()
        assert len(self.buckets) > 1

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def by_recipe(world: World, density: float, steps: int) -> list[Tensor]:
    model = net(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.2)
    algorithm = offbeat.lags(density=density)
    replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
    for step in range(steps):
        error(model, world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    replica.detach()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("density", [DENSITY, 1.0])
def test_trains_as_the_recipe_does_over_buckets_that_are_rebuilt(density: float) -> None:
    def worker(world: World) -> list[Tensor]:
        host = Host(world, density)
        host.train(range(8))
        host.links.close()
        return host.weights()

    world = ThreadWorld(3)
    expected = world.run(partial(by_recipe, density=density, steps=8))
    for ours, theirs in zip(world.run(worker), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # sums in another order


@pytest.mark.fault(
    "a gradient is infinite on one rank under lags_hook", "all ranks keep their residuals"
)
def test_an_overflow_on_one_rank_leaves_all_residuals_as_they_were() -> None:
    def worker(world: World) -> None:
        host = Host(world)
        host.train(range(3))
        before = host.state.state_dict()[f"rank{host.rank}"]["residual"]
        host.train(range(3, 4), spoil=3)
        after = host.state.state_dict()[f"rank{host.rank}"]["residual"]
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(tensor.any() for name, tensor in after.items() if name.endswith("weight"))
        host.train(range(4, 6))
        assert all(p.isfinite().all() for p in host.model.parameters())
        host.links.close()

    ThreadWorld(2).run(worker)


class Branches(nn.Module):
    """Of which a step uses one; losses are linear: gradients do not depend on parameters."""

    def __init__(self) -> None:
        super().__init__()
        weight = partial(nn.Linear, 40, 1, bias=False, dtype=torch.float64)
        self.branches = nn.ModuleList([weight(), weight()])

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.branches[number](x).mean()


def test_nothing_is_lost_of_a_layer_that_no_rank_uses_in_a_step() -> None:
    def worker(world: World) -> list[tuple[Tensor, Tensor, Tensor]]:
        links = Links.connect(world)
        opened = links.open("world")
        assert opened is not None
        model = Branches()
        for branch in model.branches:
            nn.init.ones_(branch.weight)
        given = {"process_group": opened.process_group}
        ddp = DistributedDataParallel(model, find_unused_parameters=True, **given)
        optimizer = SGD(model.parameters(), lr=0.1)
        state = LagsState(ddp, DENSITY, optimizer=optimizer, **given)
        ddp.register_comm_hook(state, lags_hook)
        sums = [torch.zeros(1, 40, dtype=torch.float64) for _ in model.branches]
        generator = torch.Generator().manual_seed(world.rank)
        for step in range(5):
            x = torch.randn(4, 40, generator=generator, dtype=torch.float64)
            ddp(x, step % 2).backward()
            sums[step % 2] += x.mean(0)
            optimizer.step()
            optimizer.zero_grad()
        residual = state.state_dict()[f"rank{world.rank}"]["residual"].values()
        weights = [branch.weight.detach() for branch in model.branches]
        links.close()
        return [*zip(weights, sums, residual, strict=True)]

    for parts in zip(*ThreadWorld(2).run(worker), strict=True):
        weight, total, residual = (torch.stack(part).mean(0) for part in zip(*parts, strict=True))
        torch.testing.assert_close(weight, 1 - 0.1 * total + residual, rtol=0, atol=1e-12)


def test_goes_on_bit_for_bit_from_its_state() -> None:
    def worker(world: World) -> dict[str, Any]:
        host = Host(world)
        host.train(range(4))
        file = io.BytesIO()
        torch.save([host.state.state_dict(), host.model.state_dict()], file)
        host.train(range(4, 8))
        host.links.close()

        file.seek(0)
        residuals, weights = torch.load(file, weights_only=True)
        again = Host(world)
        again.model.load_state_dict(weights)
        again.state.load_state_dict(residuals)
        again.train(range(4, 8))
        again.links.close()
        assert all(map(torch.equal, again.weights(), host.weights()))
        result: dict[str, Any] = residuals
        return result

    saved = {key: part for one in ThreadWorld(4).run(worker) for key, part in one.items()}

    def shrunk(world: World) -> dict[str, Tensor]:
        host = Host(world)
        host.state.load_state_dict(saved)
        own: dict[str, Tensor] = host.state.state_dict()[f"rank{host.rank}"]["residual"]
        host.links.close()
        return own

    runs = ThreadWorld(2).run(shrunk)
    for name in saved["rank0"]["residual"]:  # the last bias is sent whole by four ranks
        old = torch.stack([part["residual"][name] for part in saved.values()])
        torch.testing.assert_close(torch.stack([run[name] for run in runs]).mean(0), old.mean(0))


def test_refuses_what_does_not_fit() -> None:
    def worker(world: World) -> None:
        host = Host(world)
        with pytest.raises(ValueError, match="density=0"):
            LagsState(host.model, 0.0, process_group=host.group)
        with pytest.raises(ValueError, match="pass numbers here"):
            LagsState(host.model, "adaptive", process_group=host.group)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="needs the learning rate"):
            LagsState(host.model, units="lr", process_group=host.group)
        for module in (nn.EmbeddingBag(3, 2, sparse=True), nn.Identity()):
            with pytest.raises(ValueError, match="dense gradients of trained parameters, got"):
                LagsState(module, process_group=host.group)
        other = LagsState(nn.Linear(30, 30), process_group=host.group)
        with pytest.raises(ValueError, match="no sparse layer of that name"):
            other.load_state_dict(host.state.state_dict())
        host.links.close()

    ThreadWorld(2).run(worker)


@pytest.mark.fault(
    "one rank loads damaged residuals of the communication hook",
    "ValueError on all ranks; all keep the residuals they have",
)
@pytest.mark.parametrize(
    "damage", ["nothing", "no size", "no residual", "NaN", "a shape", "a text"]
)
def test_damaged_residuals_of_one_rank_are_refused_by_all(damage: str) -> None:
    def broken(state: dict[str, Any], rank: int) -> dict[str, Any]:
        part = state[f"rank{rank}"]
        residual, name = part["residual"], next(iter(part["residual"]))
        match damage:
            case "nothing":
                return {}
            case "no size" | "no residual":
                del part[damage.removeprefix("no ")]
            case "NaN":
                residual[name].fill_(torch.nan)
            case "a shape":
                residual[name] = torch.ones(2)
            case "a text":
                residual[name] = "a file"
        return state

    def worker(world: World) -> str:
        host = Host(world)
        host.train(range(3))
        before = host.state.state_dict()[f"rank{host.rank}"]["residual"]
        saved = host.state.state_dict()
        host.train(range(3, 4))
        now = host.state.state_dict()[f"rank{host.rank}"]["residual"]
        with pytest.raises(ValueError, match="rank 1: ") as error:
            host.state.load_state_dict(broken(saved, 1) if host.rank == 1 else saved)
        kept = host.state.state_dict()[f"rank{host.rank}"]["residual"]
        assert all(torch.equal(kept[name], now[name]) for name in before)
        host.train(range(4, 5))
        host.links.close()
        return str(error.value)

    assert len(set(ThreadWorld(2).run(worker))) == 1
