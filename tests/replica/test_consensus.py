"""The average of all replicas, shown and measured: verbs for flat scripts, BatchNorm statistics."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import offbeat
from offbeat.platform.round_trip import FAR
from offbeat.replica import consensus
from offbeat.testing import ThreadWorld
from offbeat.transport.group import Group
from offbeat.transport.world import World
from problems import ScheduleFree, seeded

SIZE = 2


def net() -> nn.Sequential:
    first, last = seeded(3, lambda: (nn.Linear(2, 4), nn.Linear(4, 1)))
    return nn.Sequential(first, nn.BatchNorm1d(4), nn.ReLU(), last)


def batches(rank: int, count: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(6, 2, generator=generator) + rank, 0) for _ in range(count)]


def apart(world: World, text: str = "local_sgd(every=99)") -> tuple[nn.Sequential, offbeat.Replica]:
    """A replica that has moved away from the others."""
    model = net()
    replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(world.rank, 3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    return model, replica


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_verbs_are_the_two_ends_of_the_block() -> None:
    def work(world: World) -> None:
        model, replica = apart(world)
        own = state(model)
        with replica.consensus():
            average = state(model)
        assert replica.show_average() is model
        replica.show_average()
        with replica.consensus():
            assert same(state(model), average)
        assert same(state(model), average)
        with pytest.raises(ValueError, match="call show_own"):
            replica.step()
        replica.show_own()
        replica.show_own()
        assert same(state(model), own)
        assert not same(average, own)
        replica.step()
        replica.show_average()
        replica.detach()
        replica.show_own()
        assert same(state(model), own)

    ThreadWorld(SIZE).run(work)


def test_ranks_far_from_others_find_the_same_average(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, at_once = list[int](), consensus.all_reduce_at_once

    def counted(tensor: Tensor, group: Group) -> None:
        calls.append(group.rank)
        at_once(tensor, group)

    def work(world: World) -> dict[str, Tensor]:
        model, replica = apart(world)
        with replica.consensus():
            shown = state(model)
        replica.finish()
        assert same(shown, state(model))
        replica.detach()
        return shown

    monkeypatch.setattr(consensus, "all_reduce_at_once", counted)
    near = ThreadWorld(3).run(work)
    assert not calls
    trips = iter([0.0, FAR, 0.0] * 2)  # one rank knows of it: in consensus() and in finish()
    monkeypatch.setattr(consensus, "round_trip", lambda: next(trips))
    for one, other in zip(ThreadWorld(3).run(work), near, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert {*calls} == {0, 1, 2}


def test_a_schedule_free_optimizer_may_switch_in_the_block_and_back_at_the_next_step() -> None:
    def work(world: World) -> None:
        model, replica = apart(world)
        replica.detach()
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
        recipe = offbeat.local_sgd(every=9)
        replica = offbeat.replicate(model, recipe, optimizer=optimizer, mesh=world)
        own = state(model)
        with replica.consensus():
            average = state(model)
            optimizer.eval()
            evaluated = state(model)
        optimizer.train()
        assert same(state(model), own)
        weight = "0.weight"
        assert evaluated[weight].equal(2 * average[weight])
        optimizer.eval()
        with replica.consensus():  # what ranks evaluate, in the mean
            assert same(state(model), evaluated)
        optimizer.train()
        assert same(state(model), own)
        replica.detach()

    ThreadWorld(SIZE).run(work)


@pytest.mark.fault(
    "an average fails on all ranks, in consensus() or show_average()",
    "ValueError on all ranks; each has its own model back, and training can go on",
    group="Calls that differ between ranks",
)
def test_an_average_that_fails_gives_the_own_values_back() -> None:
    def work(world: World) -> None:
        model, replica = apart(world)
        own = state(model)
        model.register_buffer("late", torch.ones(1 + world.rank))
        with pytest.raises(ValueError, match="found different buffers"):
            replica.show_average()
        del model.late
        assert same(state(model), own)
        replica.step()
        replica.detach()

    ThreadWorld(SIZE).run(work)


def test_update_bn_equals_torchs_on_the_batches_of_all_ranks() -> None:
    """Also where ranks have different numbers of them; gone with the block."""

    def work(world: World) -> None:
        model, replica = apart(world)
        model[1].eval()  # frozen: it stays so
        own = state(model)
        with replica.consensus():
            alone = copy.deepcopy(model)
            replica.update_bn(batches(world.rank, 1 + 2 * world.rank))
            assert not model[1].training
            update_bn([b for rank in range(SIZE) for b in batches(rank, 1 + 2 * rank)], alone)
            for ours, theirs in zip(model[1].buffers(), alone[1].buffers(), strict=True):
                if ours.is_floating_point():
                    torch.testing.assert_close(ours, theirs)
        assert same(state(model), own)
        replica.finish()
        replica.update_bn(batches(world.rank, 2))
        assert len({*replica.gather(str(model[1].running_var))}) == 1
        replica.detach()

    ThreadWorld(SIZE).run(work)


def no_batches(replica: offbeat.Replica) -> None:
    with replica.consensus():
        replica.update_bn([])


@pytest.mark.fault(
    "update_bn() outside of consensus(), or without a batch",
    "ValueError on all ranks; says where to call it",
    group="Calls that differ between ranks",
)
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda replica: replica.update_bn(batches(0, 1)), r"call it inside consensus\(\)"),
        (no_batches, "got no batches"),
    ],
)
def test_update_bn_refuses(call: Callable[[offbeat.Replica], None], text: str) -> None:
    def work(world: World) -> None:
        model, replica = apart(world)
        own = state(model)
        with pytest.raises(ValueError, match=text):
            call(replica)
        assert same(state(model), own)
        replica.step()
        replica.detach()

    ThreadWorld(SIZE).run(work)
