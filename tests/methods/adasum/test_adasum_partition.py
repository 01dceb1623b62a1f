"""The ranks of a node share the layers: who owns what, and all results as without a partition."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.functional import Layout, balance
from offbeat.methods import AdasumUpdate, Average, Mean
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from reference.participants import Nodes

PAIRS: Nodes = ((0, 1), (2, 3))
THREE_PAIRS: Nodes = ((0, 3), (1, 4), (2, 5))
TRIPLES: Nodes = ((0, 1, 2), (3, 4, 5))


class Net(nn.Module):
    """Layers of very different sizes, one of them in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        shapes = [(7, 5), (5,), (3, 5), (3,), (2, 3), (1,)]
        self.layers = nn.ParameterList(
            [nn.Parameter(torch.randn(s, generator=random, dtype=torch.float64)) for s in shapes]
        )
        self.last = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.layers
        hidden = torch.tanh(torch.tanh(x @ a + b) @ c.T + d) @ e.T + f
        return hidden.square().sum() * self.last.sum()


def batch(rank: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=random, dtype=torch.float64)


def train(
    world: World, steps: int = 5, parts: int = 1, clip: float | None = None, **options: Any
) -> list[Tensor]:
    """What Adam has made of the model after every step."""
    model = Net()
    replica = offbeat.replicate(model, offbeat.adasum(within="local", **options), mesh=world)
    optimizer = Adam(replica.owned_parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        for part, x in enumerate(batch(world.rank, step).chunk(parts)):
            replica.set_requires_sync(part == parts - 1)
            model(x).backward()
        if clip is not None:
            replica.clip_grad_norm_(clip)
        optimizer.step()
        model.zero_grad()
        replica.step()
        seen.append(vector(model))
    replica.finish()
    replica.detach()
    return [*seen, vector(model)]


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().view(-1) for p in model.parameters()])


def test_the_largest_goes_to_whoever_holds_least() -> None:
    assert balance([1, 6, 2, 3, 2], 2) == [0, 0, 1, 1, 1]
    assert balance([0, 0, 0], 3) == [0, 1, 2]
    random = np.random.default_rng(0)
    for parts in (1, 2, 3, 8):
        sizes = random.integers(1, 100, size=40).tolist()
        held = np.bincount(balance(sizes, parts), weights=sizes, minlength=parts)
        assert held.max() <= 4 / 3 * max(sum(sizes) / parts, max(sizes))


def test_no_layer_is_cut() -> None:
    tensors = dict(Net().named_parameters())
    homes = balance([t.nbytes for t in tensors.values()], 3)
    owners = dict(zip(tensors, homes, strict=True))
    layout = Layout.whole(tensors, owners, parts=3, multiple=4)
    flat = layout.empty("cpu")
    for view in layout.views(flat).values():
        assert not view.any(), "no two layers lie at one place"
        view.fill_(1)
    for section, numel in enumerate(layout.numels):
        assert numel % 12 == 0
        for part in range(3):
            third = numel // 3
            spans = layout.segments(section, part * third, (part + 1) * third)
            mine = [list(tensors)[span.layer] for span in spans]
            assert all(owners[name] == part for name in mine)
            assert sum(s.stop - s.start for s in spans) == sum(tensors[n].numel() for n in mine)


@pytest.mark.parametrize("nodes", [PAIRS, TRIPLES], ids=str)
def test_owners_share_all_parameters_and_only_they_get_gradients(nodes: Nodes) -> None:
    def worker(world: World) -> tuple[list[str], int]:
        model = Net()
        replica = offbeat.replicate(model, offbeat.adasum(partition=True), mesh=world)
        owned = {id(p) for p in replica.owned_parameters()}
        model(batch(world.rank, 0)).backward()
        names = [name for name, p in model.named_parameters() if id(p) in owned]
        assert all((p.grad is not None) == (id(p) in owned) for p in model.parameters())
        optimizer = Adam(model.parameters())  # although it was given all of them
        optimizer.step()
        moments = sum(s["exp_avg"].nbytes for s in optimizer.state.values())
        return names, moments

    found = ThreadWorld(nodes=nodes).run(worker)
    for node in nodes:
        names = [name for rank in node for name in found[rank][0]]
        assert sorted(names) == sorted(name for name, _ in Net().named_parameters())
        whole = sum(p.nbytes for p in Net().parameters())
        assert sum(found[rank][1] for rank in node) == whole
    for first, other in zip(*nodes, strict=True):
        assert found[first][0] == found[other][0], "the same layers on every node"


@pytest.mark.parametrize("partition", [False, True])
def test_a_rank_keeps_the_anchor_and_the_updates_of_its_share(partition: bool) -> None:
    """The paper's Table 1: what Adasum holds falls with the ranks that share it."""

    def held(world: World) -> float:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
        replica = offbeat.replicate(
            model, offbeat.adasum(within="local", partition=partition), mesh=world
        )
        state = replica.parameters
        kept = sum(part.nbytes for part in (*state.anchor, *state.flat))
        replica.detach()
        return kept / sum(p.nbytes for p in model.parameters())

    assert ThreadWorld(nodes=PAIRS).run(held) == [1.0 if partition else 2.0] * 4


def test_a_rank_gives_back_the_gradients_that_it_has_sent() -> None:
    def held(world: World) -> list[float]:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
        size = sum(p.nbytes for p in model.parameters())
        replica = offbeat.replicate(model, offbeat.adasum(partition=True), mesh=world)
        shares = []
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
            assert replica.gradients is not None
            buckets = replica.gradients.messages
            kept = [bucket.buffer.untyped_storage().nbytes() for bucket in buckets]
            assert all(not nbytes or bucket.owner == world.local_rank
                       for nbytes, bucket in zip(kept, buckets, strict=True))  # fmt: skip
            shares.append(sum(kept) / size)
            replica.step()
            model.zero_grad()
        replica.detach()
        return shares

    for shares in ThreadWorld(nodes=PAIRS).run(held):
        assert shares == pytest.approx([0.5] * 3, rel=0.02)  # flags and the number of the call


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (PAIRS, {"method": "rvhdd", "every": 2}),
        (PAIRS, {"method": "gather", "clip": 0.5}),
        (THREE_PAIRS, {"method": "gram", "every": 3, "clip": 1.0}),
        (TRIPLES, {"parts": 2}),
        (((0, 1),), {"clip": 0.5}),
        (((0,), (1,), (2,)), {"clip": 0.5}),
    ],
    ids=str,
)
def test_results_are_those_without_a_partition(nodes: Nodes, options: dict[str, Any]) -> None:
    world = ThreadWorld(nodes=nodes)
    plain = world.run(lambda world: train(world, **options))
    split = world.run(lambda world: train(world, partition=True, **options))
    # Sums inside a node and inner products add up in another order; Adam's first steps divide
    # gradients by their own size, and the last parameter is float32.
    for ours, theirs in zip(split, plain, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a[:-3], b[:-3], rtol=0, atol=1e-6)
            np.testing.assert_allclose(a[-3:], b[-3:], rtol=0, atol=1e-5)
    for node in nodes:
        for step, seen in enumerate(split[node[0]]):
            assert all(torch.equal(seen, split[rank][step]) for rank in node)


def test_the_norm_is_that_of_all_gradients_of_the_node() -> None:
    def worker(world: World, partition: bool, kind: float) -> tuple[float, float]:
        model = Net()
        model.nothing = nn.Parameter(torch.zeros(0, 3))  # of which there is no maximum
        algorithm = offbeat.adasum(within="local", partition=partition)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        (model(batch(world.rank, 0)) + model.nothing.sum()).backward()
        norm = float(replica.clip_grad_norm_(0.25, kind))
        again = float(replica.clip_grad_norm_(100.0, kind))
        replica.detach()
        return norm, again

    for kind in (1.0, 2.0, torch.inf):
        world = ThreadWorld(nodes=PAIRS)
        split = world.run(lambda world, kind=kind: worker(world, True, kind))
        plain = world.run(lambda world, kind=kind: worker(world, False, kind))
        np.testing.assert_allclose(split, plain, rtol=1e-6)
        # torch scales by max_norm / (norm + 1e-6).
        np.testing.assert_allclose([again for _, again in split], 0.25, rtol=1e-5)
        assert split[0] == split[1]


def test_a_node_sends_one_model() -> None:
    """On the wire between two nodes: each owner its layers, there and back."""

    def worker(world: World) -> int:
        model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
        algorithm = offbeat.adasum(partition=True, method="gram")
        replica = offbeat.replicate(model, algorithm, mesh=world)
        before = replica.stats()["bytes_by_axis"].get("node", 0)
        model(torch.ones(40)).sum().backward()
        replica.step()
        sent: int = replica.stats()["bytes_by_axis"]["node"] - before
        return sent

    products = 4 * 2 * 2 * 8  # of four layers, one small all-reduce by each owner
    kernels = 3 * 8  # whether all have the same, once
    for node in np.array(ThreadWorld(nodes=PAIRS).run(worker)).reshape(2, 2).tolist():
        assert sum(node) == 4 * 1600 * 4 + 2 * (products + kernels)


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.fault(
    "a gradient overflows on one rank under adasum and GradScaler",
    "its node skips the step",
)
def test_grad_scaler_with_an_overflow_on_one_rank(partition: bool) -> None:
    """Its node skips the step, as one; the other node's update passes through."""

    def worker(world: World) -> tuple[list[float], Tensor, Tensor]:
        model = Net()
        algorithm = offbeat.adasum(within="local", partition=partition)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = SGD(replica.owned_parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        scales, models = [], [vector(model)]
        for step in range(4):
            loss = model(batch(world.rank, step))
            if (world.rank, step) == (1, 2):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            replica.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            replica.step()
            scales.append(scaler.get_scale())
            models.append(vector(model))
        replica.detach()
        return scales, models[2] - models[3], models[4]

    found = ThreadWorld(nodes=PAIRS).run(worker)
    assert [scales for scales, _, _ in found] == [[1024.0, 1024.0, 512.0, 512.0]] * 2 + [
        [1024.0] * 4
    ] * 2
    for _, moved, after in found:
        # One node's clipped gradient alone, of norm 1, times the learning rate.
        assert float(moved.norm()) == pytest.approx(0.01, rel=1e-5)
        assert torch.equal(after, found[0][2])
        assert after.isfinite().all()


def test_an_infinity_at_one_owner_is_seen_by_its_whole_node() -> None:
    def worker(world: World) -> bool:
        model = Net()
        replica = offbeat.replicate(model, offbeat.adasum(partition=True), mesh=world)
        loss = model(batch(world.rank, 0))
        if world.rank == 2:
            loss = loss + model.last[1] * torch.inf
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        replica.detach()
        return all(bool(grad.isnan().all()) for grad in grads)

    assert ThreadWorld(nodes=PAIRS).run(worker) == [False, False, True, True]


def test_an_update_that_is_not_finite_names_its_owner() -> None:
    def worker(world: World) -> tuple[list[str], str]:
        model = Net()
        replica = offbeat.replicate(model, offbeat.adasum(partition=True), mesh=world)
        model(batch(world.rank, 0)).backward()
        owned = {id(p) for p in replica.owned_parameters()}
        names = [name for name, p in model.named_parameters() if id(p) in owned]
        if world.rank in (2, 3) and "last" in names:
            with torch.no_grad():
                model.last.fill_(torch.inf)
        with pytest.raises(ValueError, match="not finite") as error:
            replica.step()
        return names, str(error.value)

    found = ThreadWorld(nodes=PAIRS).run(worker)
    owner = next(rank for rank in (2, 3) if "last" in found[rank][0])
    assert {said.split(" is ")[0] for _, said in found} == {f"rank {owner}: parameter 'last'"}


@pytest.mark.fault(
    "a second backward before step(), with partition=True",
    "ValueError on all ranks; names set_requires_sync()",
)
def test_a_second_backward_before_the_step_is_refused_on_all_ranks() -> None:
    def worker(world: World) -> None:
        model = Net()
        replica = offbeat.replicate(model, offbeat.adasum(partition=True), mesh=world)
        model(batch(world.rank, 0)).backward()
        model.zero_grad()  # a batch that is given up is fine
        model(batch(world.rank, 1)).backward()
        with pytest.raises(ValueError, match="set_requires_sync"):
            model(batch(world.rank, 2)).backward()
        replica.detach()

    ThreadWorld(nodes=PAIRS).run(worker)


def test_sixteen_bit_gradients_meet_in_full_precision() -> None:
    """1 + 2^-8 has no place in bf16; its double has."""

    def worker(world: World) -> float | None:
        model = nn.Linear(1, 1, dtype=torch.bfloat16)
        replica = offbeat.replicate(model, offbeat.adasum(partition=True), mesh=world)
        slopes = (1.0, 2.0**-7, 2.0**-7, 1.0)
        (model.weight * slopes[world.rank]).sum().backward()
        replica.detach()
        return None if model.weight.grad is None else float(model.weight.grad)

    nodes: Nodes = ((0, 1), (2, 3))
    assert ThreadWorld(nodes=nodes).run(worker) in (
        [0.50390625, None, 0.50390625, None],
        [None, 0.50390625, None, 0.50390625],
    )


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (((0, 1), (2,)), "nodes of 2, 1 ranks"),
        ((tuple(range(8)), tuple(range(8, 16))), "7 trainable parameters for 8 ranks"),
    ],
    ids=["unequal", "few"],
)
def test_what_cannot_be_shared_is_refused_on_all_ranks(nodes: Nodes, message: str) -> None:
    def worker(world: World) -> None:
        with pytest.raises(ValueError, match=message):
            offbeat.replicate(Net(), offbeat.adasum(partition=True), mesh=world)

    ThreadWorld(nodes=nodes).run(worker)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AdasumUpdate(partition=True), "over='world'"),
        (lambda: Mean(partition=True), "over='world'"),
        (lambda: Mean(over="local", wire="bf16", partition=True), "wire='bf16'"),
        (
            lambda: offbeat.Algorithm(Mean(over="local", partition=True), Average(over="node")),
            "in both",
        ),
        (lambda: offbeat.Algorithm(None, AdasumUpdate(over="node", partition=True)), "in both"),
    ],
)
def test_half_a_partition_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
