"""Buffers of rank 0 reach the ranks that train the same model, as in DistributedDataParallel."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.links import Links
from offbeat.transport.world import World

STEPS = 4
Trace = list[Tensor]


class Scaled(nn.Module):
    """BatchNorm, and buffers of several dtypes that a training forward reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64), persistent=False)
        self.register_buffer("codes", torch.eye(4, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0).double(), 0.3)
            self.codes.lerp_(x.detach()[:4, :4].bfloat16(), 0.25)
            self.seen.add_(len(x))
        x = x / self.scale.float() + (x @ self.codes.float()) / self.seen
        result: Tensor = self.layer(self.norm(x))
        return result


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 4, generator=generator) * (1 + rank)


def train(
    model: nn.Module, forward: nn.Module, rank: int, step: Callable[[], None], backwards: int
) -> Trace:
    """What happens in some steps: gradients, and an evaluation after each of them."""
    optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(STEPS * backwards):
        forward(batch(rank, number)).square().mean().backward()
        trace += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if (number + 1) % backwards == 0:
            optimizer.step()
            optimizer.zero_grad()
            step()
            model.eval()
            trace.append(forward(batch(7, number)).detach())
            model.train()
    return trace


def with_ddp(world: World, backwards: int) -> Trace:
    links = Links.connect(world)
    group, model = links.open("world"), Scaled()
    assert group is not None
    wrapped = DistributedDataParallel(model, process_group=group.process_group)
    try:
        return train(model, wrapped, world.rank, lambda: None, backwards)
    finally:
        links.close()


def with_offbeat(world: World, text: str, backwards: int = 1) -> tuple[Trace, int]:
    model = Scaled()
    replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
    trace = train(model, model, world.rank, replica.step, backwards)
    replica.consensus_distance()  # nobody leaves while others wait
    sent = replica.stats()["total"]["bytes_sent"]
    replica.detach()
    return trace, sent


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backwards", [1, 2])
def test_ddp_equals_torchs(monkeypatch: pytest.MonkeyPatch, backwards: int) -> None:
    """Gradients and evaluations, bit for bit, also where each of two backwards exchanges."""
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)
    theirs = ThreadWorld(2).run(lambda world: with_ddp(world, backwards))
    ours = ThreadWorld(2).run(lambda world: with_offbeat(world, "ddp", backwards))
    for (mine, _), reference in zip(ours, theirs, strict=True):
        assert equal(mine, reference)


def test_choices() -> None:
    """Ranks evaluate alike where buffers are broadcast; otherwise each has its own."""
    for text, alike in [
        ("ddp(broadcast_buffers=False)", False),
        ("lags(density=0.5)", False),
        ("lags(density=0.5, broadcast_buffers=True)", True),
        ("slgs(density=0.5, broadcast_buffers=True)", True),
    ]:
        assert offbeat.algorithm(repr(offbeat.algorithm(text))) == offbeat.algorithm(text)
        (first, _), (second, _) = ThreadWorld(2).run(lambda world, t=text: with_offbeat(world, t))
        assert torch.equal(first[-1], second[-1]) is alike, text


def test_ranks_of_a_node_keep_the_buffers_of_its_first() -> None:
    world = ThreadWorld(nodes=((0, 1), (2, 3)))
    runs = world.run(
        lambda world: with_offbeat(
            world, "Mean(over='local', broadcast_buffers=True) + Average(every=9)"
        )
    )
    scores = [trace[-1] for trace, _ in runs]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[2], scores[3])
    assert not torch.equal(scores[0], scores[2])


def sent(world: World, model: nn.Module, text: str) -> dict[str, Any]:
    replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        replica.step()
    totals: dict[str, Any] = replica.stats()["total"]
    replica.detach()
    return {name: totals[name] for name in ("bytes_sent", "messages")}


def test_a_model_without_buffers_sends_nothing_for_them() -> None:
    def both(world: World) -> list[dict[str, Any]]:
        texts = "ddp", "ddp(broadcast_buffers=False)"
        return [sent(world, nn.Linear(2, 2), text) for text in texts]

    for with_them, without in ThreadWorld(2).run(both):
        assert with_them == without


@pytest.mark.fault(
    "a persistent buffer is resized, cast or removed on one rank",
    "ValueError on all ranks in the next backward; names the buffer",
)
def test_a_buffer_that_changes_on_one_rank() -> None:
    def work(world: World) -> str:
        model = nn.BatchNorm1d(2)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        if world.rank == 1:
            model.running_mean = torch.zeros(3)
        model.eval()
        with pytest.raises(ValueError, match="'running_mean' was removed, resized") as caught:
            model.weight.sum().backward()
        replica.detach()
        return str(caught.value)

    assert len(set(ThreadWorld(2).run(work))) == 1


class Cached(nn.Module):
    """A cache of the longest input so far, beside a buffer that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, length: int) -> Tensor:
        if length > len(self.cache):
            self.cache = torch.full((length,), float(length))
        self.seen += length
        result: Tensor = self.layer(self.cache[:1])
        return result.sum()


@pytest.mark.parametrize(
    ("start", "then"), [("ddp", "sgp"), ("sgp", "ddp"), ("lags(broadcast_buffers=True)", "ddp")]
)
@pytest.mark.parametrize("long", [0, 1])
def test_caches_of_other_lengths_stay_after_a_switch(start: str, then: str, long: int) -> None:
    def work(world: World) -> tuple[list[Tensor], float]:
        model, caches = Cached(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: Any = {"mesh": world, "optimizer": optimizer}
        replica = offbeat.replicate(model, offbeat.algorithm(start), **given)
        for step in range(6):
            model(5 if world.rank == long and step == 1 else 1).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            caches.append(model.cache)
            if step in (2, 4):
                replica.switch(then if step == 2 else "ddp")
        replica.detach()
        return caches, model.seen.item()

    runs = ThreadWorld(2).run(work)
    for rank, (caches, _) in enumerate(runs):
        lengths = [2, 5] if rank == long else [2, 2]
        assert [len(cache) for cache in caches] == lengths[:1] + 5 * lengths[1:]
        assert all((cache == (0 if len(cache) == 2 else 5)).all() for cache in caches)
    (_, first), (_, second) = runs
    assert first == second


def test_batch_norm_may_run_twice_before_backward() -> None:
    """Its statistics are saved for backward, and not read there."""

    def work(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        losses = [model(torch.randn(4, 2)).square().sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        replica.step()
        replica.detach()

    ThreadWorld(2).run(work)
