"""Adasum of tensors by hand: results, several in flight, errors on all ranks alike."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import offbeat
from offbeat.functional import Layout
from offbeat.methods.adasum.operands import Operands
from offbeat.methods.adasum.participants import Participants
from offbeat.methods.adasum.slice_layout import SliceLayout
from offbeat.testing import ThreadWorld
from offbeat.transport.collectives import all_reduce
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle
from offbeat.transport.links import Links
from offbeat.transport.messages import EARLY
from offbeat.transport.small_sum import SmallSum
from offbeat.transport.world import World
from reference.adasum import combine


def world(size: int, work: Any) -> list[Any]:
    """Call ``work(group)`` on every rank."""

    def worker(world: World) -> Any:
        links = Links.connect(world)
        try:
            return work(links.open("world"))
        finally:
            links.close()

    return ThreadWorld(size).run(worker)


def drawn(rank: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    kinds = ((3, 4), torch.float64), ((7,), torch.float32), ((), torch.float64)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in kinds]


def expected(size: int, index: int, seed: int = 0) -> Any:
    return combine([drawn(r, seed)[index].double().flatten().numpy() for r in range(size)])


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("method", ["gather", "gram"])
def test_every_tensor_is_a_layer(method: Any) -> None:
    def work(group: Group) -> list[torch.Tensor]:
        tensors = drawn(group.rank)
        assert offbeat.adasum_all_reduce(tensors, group, method=method) is None
        return tensors

    results = world(3, work)
    for index in range(3):
        found = [result[index] for result in results]
        assert all(torch.equal(f, found[0]) for f in found)
        tolerance = 100 * torch.finfo(found[0].dtype).eps
        np.testing.assert_allclose(
            found[0].double().flatten(), expected(3, index), rtol=tolerance, atol=tolerance
        )


def test_inner_products_do_not_take_the_place_of_large_shares() -> None:
    """Shares are too large to be expected early; what the same ranks send next is not."""
    numel = 3 * EARLY // 4 + 1  # a share of more than EARLY bytes, with four to an element

    def work(group: Group) -> torch.Tensor:
        vector = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank))
        offbeat.adasum_all_reduce([vector], group, method="gram")
        return vector

    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    reference = combine([vector.double().numpy() for vector in vectors])
    for found in world(3, work):
        tolerance = 100 * torch.finfo(found.dtype).eps
        np.testing.assert_allclose(found, reference, rtol=tolerance, atol=tolerance)


def test_several_in_flight_at_once() -> None:
    def work(group: Group) -> list[list[torch.Tensor]]:
        sets = [drawn(group.rank, seed) for seed in range(4)]
        handles = [offbeat.adasum_all_reduce(s, group, async_op=True) for s in sets]
        for handle in reversed(handles):
            assert handle is not None
            handle.wait()
        return sets

    for sets in world(3, work):
        for seed, tensors in enumerate(sets):
            np.testing.assert_allclose(tensors[0].flatten(), expected(3, 0, seed), rtol=1e-12)


@pytest.mark.fault(
    "adasum_all_reduce() gets a NaN on one rank", "ValueError on all ranks; tensors are unchanged"
)
def test_a_nan_is_an_error_on_all_ranks_and_changes_nothing() -> None:
    def work(group: Group) -> str:
        tensors = drawn(group.rank)
        if group.rank == 1:
            tensors[1][2] = torch.nan
        before = [t.clone() for t in tensors]
        with pytest.raises(ValueError, match="tensor 1 is not finite") as error:
            offbeat.adasum_all_reduce(tensors, group)
        for now, then in zip(tensors, before, strict=True):
            assert torch.equal(now.nan_to_num(9), then.nan_to_num(9))
        return str(error.value)

    assert len(set(world(3, work))) == 1


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ([], {}, "got 0 tensors"),
        ([torch.ones(2, dtype=torch.int64)], {}, "got 1 tensors, one of torch.int64"),
        ([torch.eye(2).to_sparse()], {}, "one of layout torch.sparse_coo"),
        ([torch.ones(1).expand(3)], {}, "one an expanded view"),
        ([torch.ones(2)], {"method": "gramm"}, "method='gramm', expected 'auto', "),
        ([torch.ones(2)], {"wire": "int8"}, "wire='int8', expected None"),
        ([torch.ones(2)], {"method": "rvhdd", "wire": "bf16"}, "it would round at every level"),
    ],
    ids=["none", "integers", "sparse", "expanded", "method", "wire", "both"],
)
def test_what_cannot_be_combined_is_refused(tensors: Any, settings: Any, message: str) -> None:
    def work(group: Group) -> None:
        with pytest.raises(ValueError, match=message):
            offbeat.adasum_all_reduce(tensors, group, **settings)

    world(2, work)


def test_small_sums_are_equal_on_all_ranks_bit_for_bit() -> None:
    rows = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(2))

    def work(group: Group) -> tuple[torch.Tensor, int]:
        tensor = torch.empty(7, 3)
        prepared = SmallSum(tensor, group)
        for _ in range(2):
            tensor.copy_(rows[group.rank])
            prepared.add(Handle.wait)
        return tensor, group.meter.bytes_sent["world"]

    found = world(5, work)
    torch.testing.assert_close(found[0][0], rows.sum(0))
    assert all(torch.equal(found[0][0], tensor) for tensor, _ in found)
    assert [sent for _, sent in found] == [2 * n * rows[0].nbytes for n in (4, 1, 1, 1, 1)]


def test_a_small_sum_of_opposite_infinities_warns_nobody() -> None:
    """A warning of the first rank alone may be an error there, in the middle of an exchange."""

    def work(group: Group) -> float:
        tensor = torch.tensor([torch.inf, -torch.inf, 1.0][group.rank], dtype=torch.float64)
        SmallSum(tensor, group).add(Handle.wait)
        return tensor.item()

    assert all(map(math.isnan, world(3, work)))


def test_sums_too_large_for_that_go_round_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.methods.adasum.participants.SMALL", 0)

    def work(group: Group) -> torch.Tensor:
        tensors = drawn(group.rank)
        offbeat.adasum_all_reduce(tensors, group, method="gram")
        return tensors[0].flatten()

    for found in world(3, work):
        np.testing.assert_allclose(found, expected(3, 0), rtol=0, atol=1e-12)


def of_threads(size: int, work: Any) -> list[Any]:
    """Call ``work(process_group)`` on every rank, with groups that offbeat does not own."""

    def worker(world: World) -> Any:
        assert world.opener is not None
        return work(world.opener(world.store, world.rank, world.size))

    return ThreadWorld(size).run(worker)


def test_accepts_a_process_group_of_torch() -> None:
    def work(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensors = drawn(group.rank())
        handle = offbeat.adasum_all_reduce(tensors, group, method="gram", async_op=True)
        assert handle is not None
        handle.wait()
        ones = torch.ones(2)
        group.allreduce([ones]).wait()  # the group is its owner's still
        assert ones.tolist() == [3, 3]
        return tensors

    results = of_threads(3, work)
    for index in range(3):
        found = [result[index] for result in results]
        assert all(torch.equal(f, found[0]) for f in found)
        tolerance = 100 * torch.finfo(found[0].dtype).eps
        np.testing.assert_allclose(
            found[0].double().flatten(), expected(3, index), rtol=tolerance, atol=tolerance
        )


def test_a_nan_is_an_error_on_all_ranks_of_a_process_group_of_torch() -> None:
    def work(group: dist.ProcessGroup) -> str:
        tensors = drawn(group.rank())
        if group.rank() == 1:
            tensors[1][2] = torch.nan
        with pytest.raises(ValueError, match="tensor 1 is not finite") as error:
            offbeat.adasum_all_reduce(tensors, group)
        return str(error.value)

    assert len(set(of_threads(3, work))) == 1


def test_the_default_group() -> None:
    with pytest.raises(ValueError, match="no process group"):
        offbeat.adasum_all_reduce([torch.ones(2)])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3.0, dtype=torch.float64)]
        assert offbeat.adasum_all_reduce(tensors) is None
        assert [t.tolist() for t in tensors] == [[1, 2], 3]
        assert Group.of().ranks == (0,)
        large = torch.arange(10.0**5)  # beyond what "auto" sends to all others in one hop
        for method in ("auto", "gram", "gather", "rvhdd"):
            offbeat.adasum_all_reduce([large], method=method)
            assert torch.equal(large, torch.arange(10.0**5))
    finally:
        dist.destroy_process_group()


@pytest.mark.fault(
    "adasum_all_reduce() gets a group that this rank is no member of",
    "ValueError",
    group="Settings and arguments",
)
def test_what_is_no_process_group_is_refused() -> None:
    """``new_group`` of torch returns a number on ranks that are not members."""
    with pytest.raises(ValueError, match="of which this rank is a member"):
        offbeat.adasum_all_reduce([torch.ones(2)], cast(Any, -100))


def test_of_a_gpu_kernels_are_asked_for_by_messages_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where NCCL alone carries messages, none can be sent from the CPU."""
    asked: list[tuple[str, str]] = []

    def note(peers: Participants, said: str, device: torch.device) -> bool:
        asked.append((said, device.type))
        return True

    monkeypatch.setattr(Participants, "alike", note)
    monkeypatch.setattr("offbeat.methods.adasum.operands.machine_code", lambda _: "")
    peers = Participants(2, cast(Group, SimpleNamespace(size=2, rank=0, backend=lambda _: "nccl")))
    with FakeTensorMode():
        layout = Layout.of({"w": torch.zeros(6, device="cuda")}, 2)
        pieces = (cut := SliceLayout(layout, peers)).whole()
        rows = Operands(cut, pieces, cut.runs(pieces), layout.empty("cuda"), split=False)
        rows.begin()
        rows.begin()
    assert asked == [("", "cuda")]


def test_collectives_of_the_caller_may_be_launched_meanwhile() -> None:
    """What runs on the lane sends messages with tags and launches no collective."""

    def work(world: World) -> tuple[list[Tensor], Tensor]:
        links = Links.connect(world)
        group = links.open("world")
        assert group is not None
        tensors = [torch.full((2,), float(i)) for i in range(600)]  # inner products of 117 KiB
        total = torch.ones(1000)
        handle = offbeat.adasum_all_reduce(tensors, group, method="gram", async_op=True)
        assert handle is not None
        all_reduce(total, group).wait()
        handle.wait()
        links.close()
        return tensors, total

    for tensors, total in ThreadWorld(5).run(work):
        assert all(torch.equal(t, torch.full((2,), float(i))) for i, t in enumerate(tensors))
        assert torch.equal(total, torch.full((1000,), 5.0))
