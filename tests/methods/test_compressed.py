"""Compressed gradients: a compressor of some 40 lines, and what the exchange adds to it."""

import copy
import io
import random
import time
from functools import partial
from inspect import signature
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import offbeat
import test_contract as contract
from offbeat.methods import Compressed, Compressor, Mean
from offbeat.testing import ThreadWorld, simulate, snapshot
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from recipe_cases import Case
from reference.int8 import int8
from reference.participants import Array


@final
class Int8(Compressor):
    """Gradients as 8-bit integers with one scale for each message.

    C(acc) = s q with s = max |acc| / 127, q = round(acc / s). Bytes sent: (P-1) (n + 8) for n
    entries. If an entry is not finite, the scale and with it all of C(acc) is not.
    """

    def __init__(self, like: Tensor, group: Group) -> None:
        """Allocate one row for each member: the scale as float64, then the integers."""
        self.group, self.numel = group, like.numel()
        length = 8 + -(-self.numel // 8) * 8  # each scale at a multiple of 8 bytes
        device = message_device(group, like.device)
        self.rows = torch.zeros(group.size, length, dtype=torch.int8, device=device)
        self.mean = torch.zeros_like(like)

    def launch(self, acc: Tensor) -> Tensor:
        """Round to 8 bits and launch an all-gather."""
        scale = acc.abs().amax().double() / 127
        mine = self.rows[self.group.rank]
        mine[:8].view(torch.float64).copy_(scale)
        mine[8 : 8 + self.numel].copy_((acc / scale).round().nan_to_num(0))  # 0 / 0: all are 0
        self.handle = all_gather(self.rows.view(-1), mine, self.group)
        return self._decompress(mine, acc)

    def wait(self) -> Tensor:
        """Average the members' rows, in the order of ranks: sums of floats depend on it."""
        self.handle.wait()
        self.mean.zero_()
        for row in self.rows:
            self.mean.add_(self._decompress(row, self.mean), alpha=1 / self.group.size)
        return self.mean

    def _decompress(self, row: Tensor, like: Tensor) -> Tensor:
        scale = row[:8].view(torch.float64).to(like.device)
        return row[8 : 8 + self.numel].to(like) * scale.to(like.dtype)


INT8 = offbeat.Algorithm(gradients=Compressed(compressor=Int8))
LAYERWISE = offbeat.Algorithm(gradients=Compressed(compressor=Int8, message_mb=1e-5))


class Odd(nn.Module):
    """A layer that only some ranks use, one that no rank uses, a scalar, an empty one, a bf16."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(5, 8, generator=generator))
        self.some = nn.Parameter(torch.ones(40))
        self.none = nn.Parameter(torch.ones(40))
        self.scalar = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.narrow = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))

    def forward(self, rank: int, step: int) -> Tensor:
        x = torch.randn(40, generator=torch.Generator().manual_seed(100 * step + rank))
        y = (self.first.view(-1) * x).square().sum() * self.scalar
        if (rank + step) % 2:
            y = y + (self.some * x).sum()
        return y + (self.narrow.float() * x).sum() + self.empty.sum()


class Int8Case(Case):
    """What the contract asks of every recipe, asked of an algorithm that has no text."""

    @property
    def algorithm(self) -> offbeat.Algorithm:
        return INT8


@pytest.mark.parametrize(
    "promise",
    [
        contract.test_world_of_one_is_plain_training,
        contract.test_converges_although_every_rank_has_its_own_optimum,
        contract.test_save_load_continue_equals_never_having_stopped,
        contract.test_a_run_from_attach_to_detach,
        contract.test_delays_and_micro_batches_change_nothing,
    ],
    ids=lambda promise: promise.__name__,
)
@pytest.mark.filterwarnings("ignore:rank .* keeps them equal:RuntimeWarning")
def test_keeps_the_promises_of_every_recipe(promise: Any, draws: random.Random) -> None:
    given = {"draws": draws} if "draws" in signature(promise).parameters else {}
    promise(Int8Case("int8", int8, agrees=True), **given)


def test_inside_nodes_alone() -> None:
    def worker(world: World) -> Array:
        model = Quadratic()
        exchange = Compressed(compressor=Int8, over="local")
        replica = offbeat.replicate(model, offbeat.Algorithm(gradients=exchange), mesh=world)
        loss(model, world.rank, 0).backward()
        found = flat({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        replica.detach()
        return found

    first, second, alone = ThreadWorld(nodes=((0, 1), (2,))).run(worker)
    np.testing.assert_array_equal(first, second)
    dense = np.mean([gradient(rank, START, 0) for rank in (0, 1)], axis=0)
    np.testing.assert_allclose(first, dense, rtol=0, atol=np.abs(dense).max() / 50)
    np.testing.assert_allclose(alone, gradient(2, START, 0), rtol=0, atol=1e-12)


def saved_by(replica: Any) -> dict[str, Any]:
    saved: dict[str, Any] = replica.gradients.save()
    return saved


def test_follows_the_reference_without_momentum() -> None:
    """Equal but for the order of sums: 1e-12 is 4,500 times the rounding of float64 at 1."""
    optimizer = partial(SGD, lr=0.1)
    runs = simulate(INT8, Quadratic, loss, steps=20, size=3, optimizer=optimizer)
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    theirs = int8(START, gradient, nodes=((0,), (1,), (2,)), steps=20, lr=0.1, momentum=0.0)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", [INT8, LAYERWISE], ids=["whole", "layers"])
def test_apart_from_dense_sgd_by_exactly_the_mean_residual(algorithm: offbeat.Algorithm) -> None:
    """v_t - x_t = lr (1/P) sum_p residual_p, x fed the gradients at v: acc = sent + residual."""

    def worker(world: World) -> list[tuple[Array, Array]]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        history = []
        for step in range(12):
            before = flat(snapshot(model))
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            replica.step()
            history.append((before, flat(snapshot(model)), flat(saved_by(replica)["residual"])))
        replica.detach()
        return history

    runs = ThreadWorld(3).run(worker)
    shadow = START.copy()
    for step in range(12):
        shadow -= 0.1 * np.mean([gradient(r, run[step][0], step) for r, run in enumerate(runs)], 0)
        left = np.mean([run[step][2] for run in runs], axis=0)
        np.testing.assert_allclose(runs[0][step][1] - shadow, 0.1 * left, rtol=0, atol=1e-13)
    assert np.abs(left).max() > 1e-6


@pytest.mark.parametrize(
    ("algorithm", "twice"), [(INT8, True), (LAYERWISE, False)], ids=["whole, twice", "layers"]
)
def test_unused_odd_and_16_bit_parameters(algorithm: offbeat.Algorithm, twice: bool) -> None:
    """What was handed out and what is left add up to what autograd alone finds."""

    def worker(world: World) -> dict[str, Tensor]:
        model, bare = Odd(), Odd()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        handed = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in bare.named_parameters()}
        for step in range(6):
            for part in range(1 + twice):
                model(world.rank, 2 * step + part).backward()
                bare(world.rank, 2 * step + part).backward()
            for name, p in model.named_parameters():
                assert p.grad is None or p.grad.dtype == p.dtype
                handed[name] += 0 if p.grad is None else p.grad.double()
            assert model.none.grad is None
            assert model.some.grad is not None
            model.zero_grad()
            replica.step()
        left = saved_by(replica)["residual"]
        replica.detach()
        return {
            name: handed[name] + left[name].double() - (0 if p.grad is None else p.grad.double())
            for name, p in bare.named_parameters()
        }

    runs = ThreadWorld(3).run(worker)
    for name in runs[0]:
        off = sum(run[name] for run in runs) / 3
        # Float32 sums of numbers up to 40; 16-bit results are rounded once a backward.
        np.testing.assert_allclose(off, 0, atol=0.5 if name == "narrow" else 1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [(INT8, float("nan")), (LAYERWISE, float("inf"))],
    ids=["whole", "layers"],
)
@pytest.mark.fault(
    "a gradient overflows on one rank under a compressor",
    "all ranks keep their residuals and skip the step",
)
def test_an_overflow_on_one_rank_leaves_all_residuals_as_before(
    algorithm: offbeat.Algorithm, value: float
) -> None:
    def worker(world: World) -> None:
        model = Odd()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        for step in range(4):
            before = copy.deepcopy(saved_by(replica)["residual"])
            bad = step == 2 and world.rank == 1
            (model(world.rank, step) * (value if bad else 1.0)).backward()
            after = saved_by(replica)["residual"]
            grads = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
            assert len(grads) == 4
            if step == 2:
                assert all(torch.equal(after[name], before[name]) for name in before)
                assert all(g.isnan().all() for g in grads)
            else:
                assert all(g.isfinite().all() for g in grads)
                assert not torch.equal(after["first"], before["first"])
            model.zero_grad()
            replica.step()
        replica.detach()

    ThreadWorld(3).run(worker)


def test_a_loss_scale_changes_nothing() -> None:
    """Scales are powers of two: dividing and multiplying back is exact."""

    def worker(world: World, scale: float) -> list[Tensor]:
        model = Odd()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        replica = offbeat.replicate(model, INT8, mesh=world, scaler=scaler)
        for step in range(5):
            scaler.scale(model(world.rank, step)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.01 * (p.grad / scale)
            model.zero_grad()
            replica.step()
        replica.detach()
        return [*(p.detach() for p in model.parameters()), *saved_by(replica)["residual"].values()]

    world = ThreadWorld(2)
    plain, scaled = (world.run(partial(worker, scale=scale)) for scale in (1.0, 2.0**10))
    for a, b in zip(plain, scaled, strict=True):
        assert all(map(torch.equal, a, b))


def start(world: World) -> tuple[nn.Module, SGD, Any]:
    model = Odd()
    optimizer = SGD(model.parameters(), lr=0.01)
    return model, optimizer, offbeat.replicate(model, LAYERWISE, mesh=world)


def train(model: nn.Module, optimizer: SGD, replica: Any, steps: range) -> None:
    for step in steps:
        time.sleep(0.005 * ((replica.world.rank + step) % 2))
        model(replica.world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def test_goes_on_bit_for_bit_from_its_state_and_with_means_in_another_world() -> None:
    def worker(world: World, until: int) -> dict[str, Any]:
        run = start(world)
        model, _, replica = run
        train(*run, range(until))
        saved: dict[str, Any] = replica.state_dict()
        file = io.BytesIO()
        torch.save([part.state_dict() for part in run], file)
        train(*run, range(until, 8))
        left, weights = saved_by(replica)["residual"], [p.detach() for p in model.parameters()]
        replica.detach()

        file.seek(0)
        again = start(world)
        for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        train(*again, range(until, 8))
        assert all(torch.equal(t, left[n]) for n, t in saved_by(again[2])["residual"].items())
        assert all(map(torch.equal, again[0].parameters(), weights))
        again[2].detach()
        return saved

    def shrunk(world: World) -> dict[str, Tensor]:
        *_, replica = start(world)
        replica.load_state_dict(saved)
        residual: dict[str, Tensor] = saved_by(replica)["residual"]
        replica.detach()
        return residual

    for until in (0, 1, 5):
        parts = ThreadWorld(4).run(partial(worker, until=until))
    saved = {key: entry for part in parts for key, entry in part.items()}
    runs = ThreadWorld(2).run(shrunk)
    for name in runs[0]:
        old = torch.stack([entry["gradients"]["residual"][name] for entry in saved.values()])
        new = torch.stack([run[name] for run in runs])
        torch.testing.assert_close(new.mean(0), old.mean(0))


def test_messages_are_launched_during_backward_and_in_one_order() -> None:
    """Before the last gradient is ready, all messages of the layers behind it are on their way."""

    def worker(world: World) -> list[int]:
        model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(5)])
        replica = offbeat.replicate(model, LAYERWISE, mesh=world)
        launched = []
        first = model[0].weight
        first.register_post_accumulate_grad_hook(
            lambda _: launched.append(replica.gradients.launched)
        )
        for step in range(3):
            time.sleep(0.01 * ((world.rank + step) % 2))
            model(torch.ones(6) * world.rank).sum().backward()
            model.zero_grad()
            replica.step()
        replica.detach()
        return launched

    assert ThreadWorld(3).run(worker) == [[5, 5, 5]] * 3  # its own too: our hook was there first


def test_compresses() -> None:
    """A quarter of the bytes of float32, and the flags."""

    def worker(world: World) -> list[float]:
        sent = []
        for exchange in (Mean(), Compressed(compressor=Int8)):
            model = nn.Linear(1000, 100, bias=False)
            replica = offbeat.replicate(model, offbeat.Algorithm(exchange), mesh=world)
            model(torch.ones(1000)).sum().backward()
            replica.step()
            sent.append(replica.stats()["last"]["bytes_sent"])
            replica.detach()
        return sent

    for dense, compressed in ThreadWorld(2).run(worker):
        # Between two ranks an all-reduce sends as much as an all-gather.
        assert 0.25 < compressed / dense < 0.26


def test_names_the_compressor_and_refuses_what_does_not_fit() -> None:
    assert repr(Compressed(compressor=Int8)) == (
        "Compressed(compressor=Int8, message_mb=25.0, over='world')"
    )
    with pytest.raises(ValueError, match="compressor=3, expected a callable"):
        Compressed(compressor=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="message_mb=0, expected a number of MiB, more than 0"):
        Compressed(compressor=Int8, message_mb=0)
    with pytest.raises(ValueError, match="over='node', expected"):
        Compressed(compressor=Int8, over="node")  # type: ignore[arg-type]
