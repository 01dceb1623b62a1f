"""Exchanges with all others: one after the other on near links, at once on far ones."""

import pytest
import torch
from torch import Tensor

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.collectives import mean
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle
from offbeat.transport.links import Links
from offbeat.transport.messages import WIDE, exchange, widen
from offbeat.transport.world import World

RANKS, STEPS = 4, 3


@pytest.mark.parametrize("is_far", [False, True])
def test_on_far_links_all_messages_of_a_mean_leave_at_once(
    monkeypatch: pytest.MonkeyPatch, is_far: bool
) -> None:
    monkeypatch.setattr(Group, "is_far", is_far)
    flying, most = [0] * RANKS, [0] * RANKS
    real, joined = Handle.__init__, Handle.join

    def begin(handle: Handle, group: Group, *given: object, **named: object) -> None:
        real(handle, group, *given, **named)  # type: ignore[arg-type]
        if handle.is_paired:
            flying[group.rank] += 1
            most[group.rank] = max(most[group.rank], flying[group.rank])

    def join(handle: Handle) -> None:
        joined(handle)
        flying[handle.group.rank] -= handle.is_paired

    monkeypatch.setattr(Handle, "__init__", begin)
    monkeypatch.setattr(Handle, "join", join)

    def work(world: World) -> Tensor:
        links = Links.connect(world)
        group = links.open("world")
        assert group is not None
        tensor = torch.full((10,), float(world.rank), dtype=torch.bfloat16)
        mean(tensor, group).wait()
        links.close()
        return tensor

    for tensor in ThreadWorld(RANKS).run(work):
        torch.testing.assert_close(tensor, torch.full_like(tensor, 1.5))
    assert most == [RANKS - 1 if is_far else 1] * RANKS


@pytest.mark.parametrize(
    "text", ["ddp(wire='bf16')", "adasum", "diloco(every=1, wire='int8')"], ids=str
)
def test_ranks_need_not_agree_on_what_is_far(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def trained() -> list[Tensor]:
        def work(world: World) -> Tensor:
            random = torch.Generator().manual_seed(world.rank)
            model = torch.nn.Linear(30, 30)
            torch.nn.init.normal_(model.weight, generator=random)
            torch.nn.init.zeros_(model.bias)
            replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(5, 30, generator=random)).square().mean().backward()
                optimizer.step()
                replica.step()
            return model.weight.detach().clone()

        return ThreadWorld(RANKS).run(work)

    near = trained()
    monkeypatch.setattr(Group, "is_far", property(lambda group: group.rank % 2 == 0))
    for ours, expected in zip(trained(), near, strict=True):
        assert torch.equal(ours, expected)


def test_bytes_that_let_windows_grow_reach_no_message() -> None:
    def work(world: World) -> tuple[int, Tensor]:
        links = Links.connect(world)
        group = links.open("world")
        assert group is not None
        peers, arrived = [(group.rank + 1) % RANKS, (group.rank - 1) % RANKS], torch.zeros(1000)
        for _ in range(2):  # the second waits for the first
            widen(peers, group)
            into = [(peers[1], arrived)]
            exchange([(peers[0], torch.full((1000,), 1.0 + group.rank))], into, group).wait()
        sent = group.meter.totals()["bytes_sent"] - 2 * arrived.nbytes
        links.close()
        return sent, arrived

    for rank, (sent, arrived) in enumerate(ThreadWorld(RANKS).run(work)):
        assert sent == 2 * 2 * WIDE
        assert (arrived == 1.0 + (rank - 1) % RANKS).all()
