"""What offbeat launches on NCCL, which takes one rank for each GPU: a world of one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.optim import Adam

import offbeat
from offbeat.transport.collectives import all_gather, all_reduce, broadcast, mean, reduce
from offbeat.transport.group import Group, message_device
from offbeat.transport.messages import exchange
from offbeat.transport.small_gathers import gather_numbers
from problems import Quadratic, loss
from recipe_cases import Case, every_recipe


@pytest.fixture(params=["nccl", "cpu:gloo,cuda:nccl"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """The default process group; with NCCL alone, values of the host travel over it too."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield Group.of()
    dist.destroy_process_group()


def test_messages_leave_from_the_gpu(group: Group) -> None:
    gpu = torch.device("cuda", 0)
    assert message_device(group, gpu) == gpu
    assert message_device(group).type == ("cpu" if group.backend("cpu") else "cuda")
    assert gather_numbers([1.0, 2.5], group) == [(1.0, 2.5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives(group: Group, dtype: torch.dtype) -> None:
    x = torch.arange(8, dtype=dtype, device="cuda")
    out = torch.zeros_like(x)
    for launch in (
        lambda: all_reduce(x, group),
        lambda: reduce(x, 0, group),
        lambda: broadcast(x, 0, group),
        lambda: mean(x, group),
        lambda: all_gather(out, x, group),
    ):
        launch().wait()
    assert x.tolist() == out.tolist() == list(range(8))


def test_messages_follow_the_stream_that_launches_them(group: Group) -> None:
    """A kernel that sleeps delays what is sent: a message launched beside it would carry zeros."""
    sent, received = torch.zeros(2**20, device="cuda"), torch.zeros(2**20, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        sent.fill_(3.0)
        exchange([(0, sent)], [(0, received)], group).wait()
        total = received.sum().item()
    assert total == 3.0 * 2**20


@every_recipe
def test_a_world_of_one_is_plain_training(group: Group, case: Case) -> None:
    plain, model = Quadratic(torch.float32), Quadratic(torch.float32)
    replica = offbeat.replicate(model, case.algorithm)
    for each in (plain, model):
        optimizer = Adam(each.parameters(), lr=0.1)
        for step in range(5):
            loss(each, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if each is model:
                replica.step()
    replica.detach()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
