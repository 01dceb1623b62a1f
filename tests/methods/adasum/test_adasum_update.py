"""Adasum of updates over the wire: every algorithm, layout and width; NaNs; what is saved."""

import io
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.methods import AdasumUpdate, Mean
from offbeat.testing import ThreadWorld, simulate, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from reference.adasum import adasum as reference
from reference.adasum import combine_layers
from reference.participants import Array, Nodes

UNEQUAL: Nodes = ((0, 1, 2), (3,), (4, 5))
TWO_SLICES: Nodes = ((0, 1, 2), (3, 4))
FOUR_NODES: Nodes = ((0, 1), (2, 3, 4), (5, 6), (7, 8))


class Bare(nn.Module):
    """Parameters that the test moves itself: sizes that neither ranks nor pieces divide."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(n, dtype=dtype) for n in sizes])

    def vector(self) -> torch.Tensor:
        return torch.cat([p.detach() for p in self.layers])

    def move(self, by: torch.Tensor) -> None:
        with torch.no_grad():
            parts = by.split([p.numel() for p in self.layers])
            for p, part in zip(self.layers, parts, strict=True):
                p += part


def combined(
    rows: torch.Tensor, sizes: tuple[int, ...], nodes: Nodes | None = None, **options: Any
) -> Array:
    """What one exchange makes of every participant's update; equal on all ranks, checked."""
    over = "world" if nodes is None else "node"
    nodes = nodes or tuple((rank,) for rank in range(len(rows)))
    algorithm = offbeat.Algorithm(parameters=AdasumUpdate(over=over, **options))  # type: ignore[arg-type]

    def worker(world: World) -> torch.Tensor:
        model = Bare(sizes, rows.dtype)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        model.move(rows[world.node])
        replica.step()
        return model.vector()

    first, *others = ThreadWorld(nodes=nodes).run(worker)
    assert all(torch.equal(first, other) for other in others)
    return first.double().numpy()


def drawn(ranks: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(ranks, count, generator=torch.Generator().manual_seed(ranks)).to(dtype)


@pytest.mark.parametrize(
    ("method", "sizes"), [("gather", (3,)), ("gram", (3,)), ("rvhdd", (2, 3, 4, 5, 7))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_algorithm_follows_the_reference(
    method: str, sizes: Iterable[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halving depends on the number of ranks, down to its last bit."""
    monkeypatch.setattr(
        "offbeat.methods.adasum.slice_layout.LARGEST", 400
    )  # several pieces of every slice
    layers = (301, 1, 17, 90)
    tolerance = 1e-12 if dtype == torch.float64 else 100 * torch.finfo(dtype).eps
    for size in sizes:
        rows = drawn(size, sum(layers), dtype)
        expected = combine_layers(rows.double().numpy(), layers)
        found = combined(rows, layers, method=method)
        largest = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("size", [4, 7])
def test_halving_is_the_same_where_messages_may_arrive_early_and_where_not(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large vectors share one room between the levels; small ones of any step may come early."""

    def worker(world: World) -> torch.Tensor:
        model = Bare((301, 1, 90))
        algorithm = offbeat.Algorithm(parameters=AdasumUpdate(method="rvhdd"))
        replica = offbeat.replicate(model, algorithm, mesh=world)
        for step in range(3):
            model.move((step + 1) * drawn(size, 392)[world.rank])
            replica.step()
        return model.vector()

    early = ThreadWorld(size).run(worker)
    monkeypatch.setattr("offbeat.methods.adasum.rvhdd.EARLY", 0)
    for one, other in zip(early, ThreadWorld(size).run(worker), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("method", ["gather", "gram", "rvhdd"])
@pytest.mark.parametrize("nodes", [None, TWO_SLICES], ids=str)
def test_nodes_as_participants(method: str, nodes: Nodes | None) -> None:
    """Layers that the slices of a node cut, and ranks that only receive."""
    sizes = (31, 1, 17, 9)
    rows = drawn(4 if nodes is None else len(nodes), sum(sizes))
    expected = combine_layers(rows.numpy(), sizes)
    found = combined(rows, sizes, nodes, method=method)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["gather", "gram", "rvhdd"])
@pytest.mark.parametrize(
    ("nodes", "gap"),
    [(None, 0.0), (FOUR_NODES, 1e-7), (None, 1e-4)],
    ids=["ranks, 0", "nodes", "ranks"],
)
def test_nearly_opposite_updates_lose_no_digits(
    method: str, nodes: Nodes | None, gap: float
) -> None:
    """What cancels inside the tree is combined again by the explicit tree."""
    sizes = (20, 12)
    rows = drawn(4, 32)
    rows[1, :20] = -rows[0, :20] + gap * drawn(1, 20)[0]
    found = combined(rows, sizes, nodes, method=method)
    expected = combine_layers(rows.numpy(), sizes)
    # What is left of the pair is known to eps / gap of itself, whoever computes it.
    atol = 1e-12 if gap == 0 else 1e-14 / gap
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("method", ["gather", "gram"])
@pytest.mark.parametrize(
    ("wire", "bits", "scale"), [("bf16", 8, 1.0), ("fp16", 11, 1e-12), ("fp16", 11, 1e9)]
)
def test_sixteen_bits_on_the_wire_whatever_the_magnitude(
    method: str, wire: str, bits: int, scale: float
) -> None:
    sizes = (300, 5)
    rows = drawn(3, 305, torch.float32)
    rows[:, 300:] *= 1e-3  # a layer of another magnitude has a scale of its own
    rows *= scale
    found = combined(rows, sizes, method=method, wire=wire)
    expected = combine_layers(rows.double().numpy(), sizes)
    for part in (slice(0, 300), slice(300, 305)):
        # Two roundings to half a unit, of vectors and of what is made of them; the operator
        # amplifies the first by less than 2 for random vectors.
        error = np.linalg.norm((found - expected)[part])
        assert error <= 3 * 2.0**-bits * np.linalg.norm(expected[part])
        assert error > 0


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_what_rounding_takes_is_given_back(wire: str) -> None:
    """Equal updates far below the spacing of 16 bits, summed over many exchanges."""
    algorithm = offbeat.adasum(wire=wire, method="gram")  # type: ignore[arg-type]
    by = torch.linspace(1.0, 1.01, 7, dtype=torch.float64)

    def worker(world: World) -> torch.Tensor:
        model = Bare((7,))
        replica = offbeat.replicate(model, algorithm, mesh=world)
        for _ in range(64):
            model.move(by)
            replica.step()
        return model.vector()

    for found in ThreadWorld(3).run(worker):
        # One exchange owes at most a unit of 2^-8; without feedback 64 of them would add up.
        np.testing.assert_allclose(found / 64, by, rtol=0, atol=2.0**-8 / 64 * 2)


def test_half_precision_parameters() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        rows = drawn(3, 40, dtype)
        expected = combine_layers(rows.double().numpy(), (40,))
        found = combined(rows, (40,), method="gram")
        eps = torch.finfo(dtype).eps
        np.testing.assert_allclose(found, expected, rtol=eps, atol=eps)


def test_with_plain_sgd_updates_are_gradients_and_with_adam_they_are_not() -> None:
    gradients = np.stack([gradient(rank, START, 0) for rank in range(3)])
    combination = combine_layers(gradients, (6, 3))
    for optimizer, alike in ((SGD, True), (Adam, False)):
        runs = simulate(
            offbeat.adasum(),
            Quadratic,
            loss,
            steps=1,
            size=3,
            optimizer=lambda parameters, kind=optimizer: kind(parameters, lr=0.1),
        )
        moved = flat(runs[0][-1]) - START
        assert np.allclose(moved, -0.1 * combination, rtol=0, atol=1e-12) == alike


def test_ranks_with_one_optimum_find_it() -> None:
    """Curvatures differ, so updates do; all of them vanish at the same place."""

    def worker(world: World) -> Array:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.adasum(every=2), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
        for _ in range(200):
            x = torch.cat([model.matrix.view(-1), model.vector])
            ((0.5 + world.rank / 4) * x.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        return flat(snapshot(model))

    for found in ThreadWorld(4).run(worker):
        np.testing.assert_allclose(found, 0, atol=1e-6)


@pytest.mark.parametrize("method", ["gather", "gram", "rvhdd"])
@pytest.mark.parametrize(
    ("nodes", "bad"), [(None, torch.nan), (FOUR_NODES, torch.inf)], ids=["ranks", "nodes"]
)
@pytest.mark.fault(
    "an update under adasum is NaN or infinite on one rank",
    "ValueError on all ranks; names the rank and the parameter",
)
def test_one_bad_number_is_the_same_error_on_all_ranks(
    method: str, nodes: Nodes | None, bad: float
) -> None:
    layout = nodes or ((0,), (1,), (2,), (3,))
    over = "world" if nodes is None else "node"
    algorithm = offbeat.Algorithm(parameters=AdasumUpdate(method=method, over=over))  # type: ignore[arg-type]

    def worker(world: World) -> str:
        model = Bare((5, 3, 40))
        replica = offbeat.replicate(model, algorithm, mesh=world)
        by = torch.ones(48, dtype=torch.float64)
        if world.node == 2:
            by[6] = bad
        model.move(by)
        with pytest.raises(ValueError, match="not finite") as error:
            replica.step()
        return str(error.value)

    said = set(ThreadWorld(nodes=layout).run(worker))
    assert len(said) == 1
    assert f"rank {layout[2][0]}: parameter 'layers.1' is not finite" in said.pop()


def test_half_units_add_up_in_16_bit_parameters() -> None:
    """Parallel updates of one and two units combine to 1.5, of which a half is rounded away."""
    unit = 2.0**-7  # the spacing from 1 to 2

    def work(world: World) -> float:
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        replica = offbeat.replicate(model, offbeat.adasum(), mesh=world)
        for _ in range(16):
            with torch.no_grad():
                model.weight += unit * (1 + world.rank)
            replica.step()
        replica.detach()
        return (model.weight.item() - 1) / unit

    assert ThreadWorld(2).run(work) == [24, 24]


@pytest.mark.parametrize("options", [{}, {"wire": "bf16", "method": "gram"}], ids=str)
@pytest.mark.fault(
    "an update under adasum(nonfinite='skip') is NaN on one rank",
    "all ranks keep the models from before the step",
)
def test_a_step_that_is_not_finite_may_be_skipped(options: dict[str, Any]) -> None:
    def worker(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = Bare((5, 3))
        replica = offbeat.replicate(model, offbeat.adasum(nonfinite="skip", **options), mesh=world)
        by = torch.linspace(1, 2, 8, dtype=torch.float64)
        seen = []
        for step in range(3):
            model.move(by * torch.nan if step == 1 and world.rank == 2 else by)
            replica.step()
            seen.append(model.vector())
        assert replica.stats()["measures"]["skipped"] == 1
        return seen[0], seen[1], seen[2]

    for before, skipped, after in ThreadWorld(3).run(worker):
        assert torch.equal(before, skipped)
        assert after.isfinite().all()
        assert (after > skipped).all()


def test_too_large_to_be_combined_is_said_so() -> None:
    rows = torch.full((2, 3), 1e200, dtype=torch.float64)
    with pytest.raises(ValueError, match="too large"):
        combined(rows, (3,))


def test_orthogonality_of_layers_and_their_mean() -> None:
    """One layer orthogonal, one equal, one that nobody moved."""

    def worker(world: World) -> dict[str, float]:
        model = Bare((2, 2, 2))
        replica = offbeat.replicate(model, offbeat.adasum(), mesh=world)
        assert replica.stats()["measures"] == {"skipped": 0}
        apart = torch.eye(2, dtype=torch.float64)[world.rank]
        model.move(torch.cat([apart, torch.ones(2), torch.zeros(2)]).double())
        replica.step()
        return replica.stats()["measures"]  # type: ignore[no-any-return]

    for measures in ThreadWorld(2).run(worker):
        assert measures == pytest.approx(
            {
                "skipped": 0,
                "orthogonality": 0.75,
                "orthogonality/layers.0": 1.0,
                "orthogonality/layers.1": 0.5,
            }
        )


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ({"every": 3, "wire": "bf16", "method": "gram"}, ((0,), (1,), (2,))),
        ({"every": 2, "wire": "fp16", "method": "gather"}, ((0,), (1,), (2,))),
        ({"every": 2, "wire": "fp16", "method": "gram", "over": "node"}, TWO_SLICES),
        ({"every": 2, "wire": "bf16", "method": "gather", "over": "node"}, TWO_SLICES),
        ({"every": 2, "wire": "bf16", "over": "node", "partition": True}, ((0, 1), (2, 3))),
    ],
    ids=str,
)
def test_resuming_goes_on_bit_for_bit(options: dict[str, Any], nodes: Nodes) -> None:
    """From between two exchanges, with errors of rounding that are still owed."""
    partition = options.get("partition", False)
    gradients = Mean(over="local", partition=partition) if "over" in options else None
    algorithm = offbeat.Algorithm(gradients, AdasumUpdate(**options))

    def worker(world: World) -> None:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = Adam(model.parameters(), lr=0.1)
        train(model, replica, world.rank, optimizer, 7)
        file = io.BytesIO()
        parts = {"replica": replica, "optimizer": optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        train(model, replica, world.rank, optimizer, 5)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        kept = saved["replica"][f"rank{world.rank}"]["parameters"]
        mine = {id(p) for p in replica.owned_parameters()}
        assert kept["anchor"].keys() == {n for n, p in model.named_parameters() if id(p) in mine}
        again = Quadratic(torch.float32)
        resumed = offbeat.replicate(again, algorithm, mesh=world)
        resumed.load_state_dict(saved["replica"])
        optimizer = Adam(again.parameters(), lr=0.1)
        optimizer.load_state_dict(saved["optimizer"])
        train(again, resumed, world.rank, optimizer, 5)
        assert all(
            torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
        )

    ThreadWorld(nodes=nodes).run(worker)


def train(model: nn.Module, replica: offbeat.Replica, rank: int, optimizer: Any, n: int) -> None:
    for step in range(n):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_finish_performs_the_exchange_that_is_due(wire: Any) -> None:
    """After two of three steps; what roundings took is not lost."""
    nodes: Nodes = ((0,), (1,), (2,))
    algorithm = offbeat.adasum(every=3, wire=wire, method="gram")

    def worker(world: World) -> Array:
        model = Quadratic()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        train(model, replica, world.rank, SGD(model.parameters(), lr=0.1), 2)
        with replica.consensus():
            shown = flat(snapshot(model))
        replica.finish()
        np.testing.assert_array_equal(flat(snapshot(model)), shown)
        return shown

    theirs = reference(START, gradient, layers=(6, 3), nodes=nodes, steps=2, lr=0.1, every=2)[-1]
    np.testing.assert_allclose(ThreadWorld(nodes=nodes).run(worker), theirs, rtol=0, atol=1e-12)


def test_bytes_are_those_of_an_all_reduce() -> None:
    size, numel = 4, 80000

    def worker(world: World) -> tuple[int, int]:
        found = []
        for wire in (None, "bf16"):
            model = Bare((numel,), torch.float32)
            replica = offbeat.replicate(model, offbeat.adasum(wire=wire), mesh=world)  # type: ignore[arg-type]
            replica.step()  # which also asks who has which kernels
            before = replica.stats()["total"]["bytes_sent"]
            replica.step()
            found.append(replica.stats()["total"]["bytes_sent"] - before)
        return found[0], found[1]

    gram = 8 * size**2  # so small that the first rank adds it, and sends it to all others
    for rank, (full, half) in enumerate(ThreadWorld(size).run(worker)):
        products = gram if rank else (size - 1) * gram
        assert full == 2 * (size - 1) * 4 * numel // size + products
        assert half == 2 * (size - 1) * 2 * numel // size + products


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0, expected a whole number"),
        ({"wire": "fp8"}, "wire='fp8', expected None (full precision), 'bf16' or 'fp16'"),
        ({"method": "ring"}, "method='ring', expected 'auto', 'gather', 'gram' or 'rvhdd'"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore', expected 'raise' or 'skip'"),
        ({"method": "rvhdd", "wire": "bf16"}, "round at every level; use method='gram'"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        offbeat.adasum(**options)
