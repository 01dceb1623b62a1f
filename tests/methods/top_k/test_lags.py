"""LAGS and SLGS: units, memory, overflow, resuming; the contract has the rest."""

import copy
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.kernels.dispatch import each_block
from offbeat.methods import TopK, deltas
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from reference.adasum import bf16
from reference.ddp import ddp
from reference.lags import fp16, lags, top_k
from reference.participants import Array

LAYERS = (6, 3)


def residual(replica: offbeat.Replica) -> Array:
    """This rank's residuals as one vector."""
    return flat(replica.gradients and _saved(replica)["residual"])


def _saved(replica: offbeat.Replica) -> dict[str, Any]:
    saved: dict[str, Any] = replica.gradients.save()
    return saved


def run(
    size: int, algorithm: offbeat.Algorithm, rates: Sequence[float], given: bool = True
) -> tuple[Array, Array]:
    """Models and residuals, (steps + 1, ranks, d), of plain SGD with these learning rates."""

    def worker(world: World) -> list[tuple[Array, Array]]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = offbeat.replicate(
            model, algorithm, mesh=world, optimizer=optimizer if given else None
        )
        history = [(flat(snapshot(model)), residual(replica))]
        for step, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            history.append((flat(snapshot(model)), residual(replica)))
        replica.detach()
        return history

    runs = ThreadWorld(size).run(worker)
    return tuple(np.array([[s[i] for s in r] for r in runs]).swapaxes(0, 1) for i in (0, 1))


RATES = [0.1 / (1 + k) for k in range(20)]


@pytest.mark.parametrize(
    ("size", "given", "selection"),
    [(2, True, "exact"), (2, False, "sampled"), (3, False, "exact")],
)
def test_follows_the_reference_in_both_units(size: int, given: bool, selection: Any) -> None:
    """The learning rate falls on the way; what was kept keeps its own."""
    algorithm = offbeat.lags(density=0.2, selection=selection)
    models, residuals = run(size, algorithm, RATES, given)
    expected = lags(
        START,
        gradient,
        nodes=tuple((r,) for r in range(size)),
        steps=len(RATES),
        lr=RATES,
        layers=LAYERS,
        density=0.2,
        lr_units=given,
    )
    np.testing.assert_allclose(models, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(residuals, expected[1], rtol=0, atol=1e-12)
    assert np.abs(residuals[-1]).max() > 1e-3


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2, "lags(0.12)"),
        (3, "slgs(0.12)"),
        (2, "lags(0.12, wire='bf16')"),
        (3, "lags(0.12, wire='fp16')"),
    ],
)
def test_apart_from_dense_sgd_by_exactly_the_mean_residual(size: int, text: str) -> None:
    """v_t - x_t = (1/P) sum_p residual_p, x fed the gradients at v (eq. 10)."""
    models, residuals = run(size, offbeat.algorithm(text), RATES)
    shadow = START.copy()
    for k, rate in enumerate(RATES):
        shadow -= rate * np.mean([gradient(r, models[k, r], k) for r in range(size)], axis=0)
        np.testing.assert_allclose(
            models[k + 1, 0] - shadow, residuals[k + 1].mean(axis=0), rtol=0, atol=1e-13
        )


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"momentum": 0.9}),
        (2, {"momentum": 0.9, "masking": True}),
        (2, {"clip_norm": 1.2}),
        (4, {"clip_norm": 1.2, "momentum": 0.5, "masking": True}),
    ],
    ids=str,
)
def test_correction_and_local_clipping_follow_the_reference(
    size: int, settings: dict[str, Any]
) -> None:
    """With four ranks layers are sent whole, and are clipped too."""
    rates = [0.05] * 15
    models, residuals = run(size, offbeat.lags(density=0.2, **settings), rates)
    expected = lags(
        START,
        gradient,
        nodes=tuple((r,) for r in range(size)),
        steps=15,
        lr=rates,
        layers=LAYERS,
        density=0.2,
        correction=settings.get("momentum", 0.0),
        masking=settings.get("masking", False),
        clip=settings.get("clip_norm", np.inf),
        lr_units=True,
    )
    np.testing.assert_allclose(models, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(residuals, expected[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("wire", [None, "fp16"])
def test_layers_with_learning_rates_of_their_own_are_apart_by_the_residual(wire: Any) -> None:
    """Both in one message; one rate is 0 in some steps, and then nothing is sent of its layer."""
    rates = np.array([[0.1, 0.1 * (k % 3)] for k in range(9)])

    def worker(world: World) -> list[tuple[Array, Array]]:
        model = Quadratic()
        groups = [{"params": [model.matrix]}, {"params": [model.vector]}]
        optimizer = SGD(groups, lr=1.0)
        replica = offbeat.replicate(
            model, offbeat.lags(0.35, wire=wire), mesh=world, optimizer=optimizer
        )
        history = []
        for step, each in enumerate(rates):
            for group, rate in zip(optimizer.param_groups, each, strict=True):
                group["lr"] = float(rate)
            before = flat(snapshot(model))
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            history.append((before, residual(replica)))
        history.append((flat(snapshot(model)), residual(replica)))
        replica.detach()
        return history

    runs = ThreadWorld(2).run(worker)
    shadow = START.copy()
    for k, each in enumerate(rates):
        now = runs[0][k][0]
        grads = np.mean([gradient(r, now, k) for r in range(2)], axis=0)
        shadow -= np.repeat(each, LAYERS) * grads
        left = np.mean([run[k][1] for run in runs], axis=0)
        np.testing.assert_allclose(runs[0][k + 1][0] - shadow, left, rtol=0, atol=1e-13)
        assert each[1] or (runs[0][k + 1][0][6:] == now[6:]).all()
    assert np.abs(left).min() > 0


@pytest.mark.parametrize(
    ("size", "given", "wire", "rounded"), [(2, False, "bf16", bf16), (3, True, "fp16", fp16)]
)
def test_16_bit_values_follow_the_reference(
    size: int, given: bool, wire: Any, rounded: Any
) -> None:
    models, residuals = run(size, offbeat.lags(density=0.4, wire=wire), RATES, given)
    expected = lags(
        START,
        gradient,
        nodes=tuple((r,) for r in range(size)),
        steps=len(RATES),
        lr=RATES,
        layers=LAYERS,
        density=0.4,
        lr_units=given,
        rounded=rounded,
    )
    np.testing.assert_allclose(models, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(residuals, expected[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("wire", "bits", "size"), [("bf16", 8, 1.0), ("fp16", 11, 1e-12), ("fp16", 11, 1e9)]
)
def test_16_bit_values_keep_their_digits_at_any_size(wire: Any, bits: int, size: float) -> None:
    """Far beyond 65504 and below 6e-8, where float16 ends; what is lost is the residual."""

    def worker(world: World) -> tuple[Tensor, Tensor]:
        model = nn.Linear(40, 1, bias=False)
        replica = offbeat.replicate(model, offbeat.lags(0.05, wire=wire), mesh=world)
        model(torch.arange(40) * (size / 3)).sum().backward()
        assert model.weight.grad is not None
        found = model.weight.grad[0].clone(), _saved(replica)["residual"]["weight"][0]
        replica.step()
        replica.detach()
        return found

    exact = torch.arange(40) * (size / 3)
    for sent, residual in ThreadWorld(2).run(worker):
        torch.testing.assert_close(sent[38:], exact[38:], rtol=2.0**-bits, atol=0)
        torch.testing.assert_close(sent + residual, exact, rtol=1e-6, atol=0)
        assert (residual[38:] != 0).any()


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_what_float16_cannot_hold_is_sent_in_the_next_steps(wire: Any) -> None:
    """An entry that has waited for many steps is beyond the largest number of its gradient."""

    def worker(world: World) -> tuple[Tensor, Tensor]:
        model = nn.ParameterList([torch.zeros(40, dtype=torch.float16)])
        lags = offbeat.lags(0.05, selection="exact", wire=wire)
        replica = offbeat.replicate(model, lags, mesh=world)
        got = torch.zeros(40)
        for step in range(4):
            share = torch.full((40,), 30_000.0 if step < 2 else 0.0, dtype=torch.float16)
            share[0] = 60_000.0 if step < 2 else 0.0
            (model[0] * share).sum().backward()
            assert model[0].grad is not None
            assert model[0].grad.isfinite().all()
            got += model[0].grad.float()
            model.zero_grad()
            replica.step()
        residual = _saved(replica)["residual"]["0"].clone()
        replica.detach()
        return got, residual

    everything = torch.full((40,), 60_000.0)
    everything[0] = 120_000.0
    for sent, residual in ThreadWorld(2).run(worker):
        assert sent[0] > 70_000, "more than one gradient can hold"
        torch.testing.assert_close(sent + residual, everything, rtol=1e-3, atol=0)  # float16


def test_momentum_correction_of_all_entries_is_momentum() -> None:
    models, _ = run(3, offbeat.lags(density=1.0, momentum=0.9), [0.1] * 10)
    nodes = ((0,), (1,), (2,))
    expected = ddp(START, gradient, nodes=nodes, steps=10, lr=0.1, momentum=0.9)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-12)


def test_a_learning_rate_of_zero_sends_nothing_and_forgets_nothing() -> None:
    models, residuals = run(2, offbeat.lags(density=0.2), [0.1, 0.0, 0.0, 0.1])
    for k in (1, 2):
        np.testing.assert_array_equal(models[k + 1], models[k])
        np.testing.assert_array_equal(residuals[k + 1], residuals[k])
    assert np.abs(residuals[1]).max() > 0
    assert (models[4] != models[3]).any()


def test_a_learning_rate_of_almost_zero_sends_nothing() -> None:
    """The factor from residuals to gradients would be infinite."""

    def worker(world: World) -> list[float]:
        weight = nn.Parameter(torch.zeros(40))
        optimizer = SGD([weight], lr=1e-39)
        model = nn.ParameterList([weight])
        lags = offbeat.lags(density=0.05)
        replica = offbeat.replicate(model, lags, mesh=world, optimizer=optimizer)
        (weight * torch.arange(40.0)).sum().backward()
        replica.step()
        assert weight.grad is not None
        found = weight.grad.tolist()
        replica.detach()
        return found

    assert ThreadWorld(2).run(worker) == [[0.0] * 40] * 2


def test_a_density_that_falls_takes_the_residuals_along() -> None:
    models, residuals = run(2, offbeat.lags(density=0.12, warmup=6), [0.1] * 12)
    shadow = START.copy()
    for k in range(12):
        shadow -= 0.1 * np.mean([gradient(r, models[k, r], k) for r in range(2)], axis=0)
    np.testing.assert_allclose(models[-1, 0] - shadow, residuals[-1].mean(axis=0), atol=1e-13)


class Wide(nn.Module):
    """Two layers of 40, one that only some ranks use, one that nobody uses, a scalar, a bf16."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(5, 8, generator=generator))
        self.second = nn.Parameter(torch.randn(40, generator=generator))
        self.some = nn.Parameter(torch.ones(40))
        self.none = nn.Parameter(torch.ones(40))
        self.scalar = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.narrow = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))

    def forward(self, rank: int, step: int) -> Tensor:
        x = torch.randn(40, generator=torch.Generator().manual_seed(100 * step + rank))
        y = (self.first.view(-1) * x).square().sum() + (self.second * x).sin().sum() * self.scalar
        if (rank + step) % 2:
            y = y + (self.some * x).sum()
        return y + (self.narrow.float() * x).sum() + self.empty.sum()


def attach(world: World, algorithm: offbeat.Algorithm, **more: Any) -> tuple[Wide, Any]:
    model = Wide()
    return model, offbeat.replicate(model, algorithm, mesh=world, **more)


def test_unused_odd_and_16_bit_parameters() -> None:
    """Mass is kept: what was sent and what is left add up to what was put in."""

    def worker(world: World) -> dict[str, Tensor]:
        model, replica = attach(world, offbeat.lags(density=0.05))
        bare = Wide()
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in bare.named_parameters()}
        for step in range(6):
            model(world.rank, step).backward()
            bare(world.rank, step).backward()  # the same: nobody steps
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] -= p.grad.double()
                assert p.grad is None or p.grad.dtype == p.dtype
            assert model.none.grad is None
            assert model.some.grad is not None
            model.zero_grad()
            replica.step()
        for name, p in bare.named_parameters():
            total[name] *= 1 / world.size
            total[name] += 0 if p.grad is None else p.grad.double() / world.size
            total[name] -= _saved(replica)["residual"][name].double() / world.size
        replica.detach()
        return total

    runs = ThreadWorld(3).run(worker)
    for name in runs[0]:
        off = sum(run[name] for run in runs)
        # float32 sums of numbers up to 40; 16-bit results are rounded once a step.
        np.testing.assert_allclose(off, 0, atol=0.5 if name == "narrow" else 1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lags(density=0.05)", float("nan")),
        ("slgs(density=0.05)", float("inf")),
        ("lags(density=1.0)", float("nan")),
        ("lags(density=0.05, clip_norm=1.0, wire='fp16')", float("inf")),
    ],
)
@pytest.mark.fault(
    "a gradient is NaN or infinite on one rank under lags",
    "residuals as before; all gradients become NaN",
)
def test_an_overflow_on_one_rank_undoes_the_selection_of_all(text: str, value: float) -> None:
    def worker(world: World) -> None:
        model, replica = attach(world, offbeat.algorithm(text))
        for step in range(4):
            before = copy.deepcopy(_saved(replica)["residual"])
            bad = step == 2 and world.rank == 1
            (model(world.rank, step) * (value if bad else 1.0)).backward()
            after = _saved(replica)["residual"]
            grads = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
            assert len(grads) == 5
            if step == 2:
                assert all(torch.equal(after[name], before[name]) for name in before)
                assert all(g.isnan().all() for g in grads)
            else:
                assert all(g.isfinite().all() for g in grads)
                assert text.startswith("lags(density=1") or any(r.any() for r in after.values())
            model.zero_grad()
            replica.step()
        replica.detach()

    ThreadWorld(3).run(worker)


@pytest.mark.fault(
    "a gradient overflows on one rank under GradScaler",
    "all ranks skip the step and lower the scale",
)
@pytest.mark.parametrize("clip_norm", [None, 1.2])
def test_a_loss_scale_changes_nothing_and_one_overflow_skips_all_ranks(
    clip_norm: float | None,
) -> None:
    """Scales are powers of two: dividing and multiplying back is exact."""

    def worker(world: World, scaled: bool) -> Array:
        model = Quadratic(torch.float32)
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        algorithm = offbeat.lags(density=0.2, clip_norm=clip_norm)
        replica = offbeat.replicate(
            model, algorithm, mesh=world, optimizer=optimizer, scaler=scaler
        )
        for step in range(8):
            overflow = step == 4 and world.rank == 1
            value = loss(model, world.rank, step) * (float("inf") if overflow else 1.0)
            scaler.scale(value).backward()
            if scaled or step != 4:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            replica.step()
        assert scaler.get_scale() == (2.0**9 if scaled else 1.0)
        replica.detach()
        return np.stack([flat(snapshot(model)), residual(replica)])

    world = ThreadWorld(3)
    plain = world.run(partial(worker, scaled=False))
    np.testing.assert_array_equal(world.run(partial(worker, scaled=True)), plain)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_second_backward_before_the_step_exchanges_only_its_own_part(set_to_none: bool) -> None:
    def worker(world: World, together: bool) -> list[Tensor]:
        model, replica = attach(world, offbeat.lags(density=0.05))
        kept = []
        for step in range(4):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for part in range(3):
                model(world.rank, 3 * step + part).backward()
                if not together:
                    for sum_, p in zip(total, model.parameters(), strict=True):
                        sum_ += 0 if p.grad is None else p.grad
                        with torch.no_grad():
                            p.mul_(1)  # used, not discarded
                    model.zero_grad(set_to_none=set_to_none)
            if together:
                total = [torch.zeros_like(p) if p.grad is None else p.grad for p in
                         model.parameters()]  # fmt: skip
            # The last, of 16 bits, is left out: autograd itself rounds its sums there.
            kept += [t.detach().clone().double() for t in total[:-1]]
            model.zero_grad(set_to_none=set_to_none)
            replica.step()
        replica.detach()
        return kept

    world = ThreadWorld(2)
    for ours, theirs in zip(
        world.run(partial(worker, together=True)),
        world.run(partial(worker, together=False)),
        strict=True,
    ):
        for a, b in zip(ours, theirs, strict=True):
            # What was there is taken off and put back: float32 rounding of numbers up to 100.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.fault(
    "residuals of lags are loaded by another number of ranks",
    "their mean is kept; ValueError if those of a rank are missing",
    group="Checkpoints",
)
def test_resumes_in_a_world_of_another_size_with_the_mean_of_the_residuals() -> None:
    algorithm = offbeat.lags(density=0.05, momentum=0.5)

    def before(world: World) -> dict[str, Any]:
        model, replica = attach(world, algorithm)
        for step in range(3):
            model(world.rank, step).backward()
            model.zero_grad()
            replica.step()
        saved: dict[str, Any] = replica.state_dict()
        replica.detach()
        return saved

    def after(world: World, saved: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
        model, replica = attach(world, algorithm)
        replica.load_state_dict(saved)
        found = _saved(replica)
        model(world.rank, 3).backward()
        model.zero_grad()
        replica.step()
        replica.detach()
        return {key: found[key] for key in ("residual", "velocity")}

    parts = ThreadWorld(4).run(before)
    everybody: dict[str, Any] = {}
    for part in parts:
        everybody |= part
    for size in (2, 3, 8):
        found = ThreadWorld(size).run(partial(after, saved=everybody))
        for key in ("residual", "velocity"):
            for name in found[0][key]:
                if name in ("scalar", "empty"):
                    continue  # sent whole: nothing is kept
                old = torch.stack([e["gradients"][key][name] for e in everybody.values()])
                new = torch.stack([one[key][name] for one in found])
                torch.testing.assert_close(new.mean(0), old.mean(0), rtol=1e-5, atol=1e-6)
                assert key == "velocity" or name == "none" or old.any(), name
    assert torch.equal(found[5]["residual"]["first"], found[1]["residual"]["first"])
    with pytest.raises(ValueError, match=r"ranks \[1\] are missing.*of ranks \[0, 1\] of 4"):
        ThreadWorld(2).run(partial(after, saved=parts[0]))
    with pytest.raises(ValueError, match="residuals of ranks"):
        ThreadWorld(4).run(partial(after, saved=parts[0]))


def test_two_replicas_in_one_process_and_any_order_of_readiness() -> None:
    """Each has its own residuals; layers that swap places mix nothing up."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList([nn.Parameter(torch.ones(50)) for _ in range(6)])

        def forward(self, order: list[int], rank: int) -> Tensor:
            x = torch.linspace(-1, 1, 50) + rank
            for i in order:
                x = torch.sin(x * self.layers[i])
            return x.sum()

    def worker(world: World) -> list[Tensor]:
        models = [Shuffled(), Shuffled()]
        algorithm = offbeat.lags(density=0.04, message_mb=1e-5)  # one message a layer
        replicas = [offbeat.replicate(m, algorithm, mesh=world) for m in models]
        orders = random.Random(world.rank)
        for step in range(5):
            for model, replica in zip(models, replicas, strict=True):
                time.sleep(orders.choice([0, 0.005]))
                order = orders.sample(range(6), 6) if model is models[0] else list(range(6))
                model(order, world.rank).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                model.zero_grad()
                replica.step()
                assert replica.stats()["last"]["messages"] == 6 or step == 0
        for replica in replicas:
            replica.detach()
        return [p.detach() for model in models for p in model.parameters()]

    first, *others = ThreadWorld(3).run(worker)
    for other in others:
        assert all(map(torch.equal, first, other))
    assert not torch.equal(first[0], first[6])


@pytest.mark.parametrize("weights", [None, (1, 3)])
def test_delta_is_that_of_the_gathered_vectors(weights: tuple[int, int] | None) -> None:
    """In the first step x is the gradient itself."""

    def worker(world: World) -> tuple[dict[str, float], Array]:
        model = Quadratic()
        lags, is_weighted = offbeat.lags(density=0.2), weights is not None
        replica = offbeat.replicate(model, lags, mesh=world, weighted=is_weighted)
        own = gradient(world.rank, START, 0)
        if weights is not None:
            replica.set_weight(weights[world.rank])
            own = own * weights[world.rank]
        loss(model, world.rank, 0).backward()
        found = deltas(replica.gradients)
        replica.detach()
        return found, own

    runs = ThreadWorld(2).run(worker)
    rows = np.stack([own for _, own in runs])
    for name, layer in (("matrix", slice(0, 6)), ("vector", slice(6, 9))):
        x = rows[:, layer]
        left = x - np.stack([top_k(row, 1) for row in x])
        random = (1 - 1 / x.shape[1]) * np.square(x.sum(0)).sum()
        for found, _ in runs:
            assert found[name] == pytest.approx(np.square(left.sum(0)).sum() / random, rel=1e-12)


@pytest.mark.parametrize(
    "exchange",
    [TopK(density=0.05, measure=True, retune=6), TopK(density=0.05, scope="model", measure=True)],
    ids=["layers", "model"],
)
def test_the_bound_of_the_speedup_is_measured_at_a_fixed_density(exchange: TopK) -> None:
    """The bound of eq. 19 from the times beside it; densities and messages stay."""

    def worker(world: World) -> list[dict[str, Any]]:
        model, replica = attach(world, offbeat.Algorithm(gradients=exchange))
        found = []
        for step in range(14):
            model(world.rank, step).backward()
            model.zero_grad()
            replica.step()
            found.append(replica.stats()["lags"])
        replica.detach()
        return found

    first, *others = ThreadWorld(3).run(worker)
    assert ["S_max" in found for found in first] == 5 * [False] + 9 * [True]
    assert all(found["c"] == first[3]["c"] for found in first[3:])
    again = first[12]["t_comp"] != first[5]["t_comp"]
    assert again == (exchange.retune == 6)
    for found in (first[-1], *(run[-1] for run in others)):
        assert found["c_max"] == max(found["c"].values()) > 1
        forward, backward, exchanged = (
            found["t_forward"], sum(found["t_comp"].values()), found["t_comm"]
        )  # fmt: skip
        r = exchanged / backward
        bound = 1 + 1 / (forward / min(exchanged, backward) + max(r, 1 / r))
        assert found["S_max"] == pytest.approx(bound)
        assert 0 <= found["share"] <= 1
        assert found["t_comp"] == first[-1]["t_comp"]


def test_nothing_is_measured_unless_asked() -> None:
    def worker(world: World) -> bool:
        model, replica = attach(world, offbeat.lags(density=0.05))
        for step in range(8):
            model(world.rank, step).backward()
            model.zero_grad()
            replica.step()
        found = replica.stats()["lags"]
        replica.detach()
        return "S_max" in found

    assert ThreadWorld(2).run(worker) == [False, False]


def test_adaptive_ratios_are_measured_agreed_on_and_survive_a_restart() -> None:
    algorithm = offbeat.lags(density="adaptive", max_ratio=50)

    def worker(world: World) -> dict[str, Any]:
        model, replica = attach(world, algorithm)
        for step in range(9):
            model(world.rank, step).backward()
            model.zero_grad()
            replica.step()
        found: dict[str, Any] = replica.stats()["lags"]
        saved = replica.state_dict()
        replica.detach()
        _, again = attach(world, algorithm)
        again.load_state_dict(saved)
        assert again.stats()["lags"]["c"] == found["c"]
        again.detach()
        return found

    first, *others = ThreadWorld(3).run(worker)
    for other in others:
        assert other["c"] == first["c"]
        assert other["t_comp"] == first["t_comp"]
    assert all(1 <= ratio <= 50 for ratio in first["c"].values())
    assert first["c"]["scalar"] == 1
    # The layer whose backward is last has nothing to hide behind.
    assert first["S_max"] >= 1
    assert 0 <= first["share"] <= 1


@pytest.mark.parametrize(("wire", "entry"), [(None, 8), ("bf16", 6), ("fp16", 6)])
def test_sends_what_the_docstring_says(wire: Any, entry: int) -> None:
    """(P-1) (8 k + 4) a layer, two words more, and one for the scale or an even number of them."""

    def worker(world: World) -> float:
        model = nn.Linear(100, 100, bias=False)
        replica = offbeat.replicate(model, offbeat.lags(density=0.01, wire=wire), mesh=world)
        for _ in range(2):
            model(torch.randn(3, 100)).sum().backward()
            model.zero_grad()
            replica.step()
        sent = replica.stats()["last"]["bytes_sent"]
        replica.detach()
        return float(sent)

    assert set(ThreadWorld(3).run(worker)) == {2 * (entry * 100 + 4 + 8 + 4)}


def test_the_reference_selects_as_known() -> None:
    assert top_k(np.array([1.0, -3.0, 2.0]), 2).tolist() == [0, -3, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"density": 0.0}, "density=0.0"),
        ({"density": 1.5}, "density=1.5"),
        ({"density": True}, "density=True"),
        ({"selection": "best"}, "'sampled', 'exact' or a callable"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"masking": True}, "masking=True with momentum=0.0"),
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"wire": "int8"}, "wire='int8', expected None .full precision., 'bf16' or 'fp16'"),
        ({"warmup": 0}, "warmup=0"),
        ({"warmup": 2.5}, "warmup=2.5"),
        ({"message_mb": 0}, "message_mb=0"),
        ({"units": "kg"}, "units='kg'"),
        ({"scope": "world"}, "scope='world'"),
    ],
)
def test_refuses_settings_that_mean_nothing(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TopK(**settings)


@pytest.mark.fault(
    "lags gets an optimizer that omits a parameter or applies momentum twice",
    "ValueError on all ranks",
    group="Settings and arguments",
)
def test_refuses_optimizers_that_do_not_fit() -> None:
    def worker(world: World, make: Any, algorithm: offbeat.Algorithm) -> None:
        model = Quadratic()
        offbeat.replicate(model, algorithm, mesh=world, optimizer=make(model))

    corrected = offbeat.lags(momentum=0.9)
    cases = [
        (lambda model: SGD([model.vector], lr=0.1), offbeat.lags(), "'matrix' is in none"),
        (lambda model: None, offbeat.lags(units="lr"), "needs the learning rate"),
        (lambda model: SGD(model.parameters(), lr=1, momentum=0.9), corrected, "act twice"),
        (lambda model: Adam(model.parameters()), corrected, "act twice"),
    ]
    for make, algorithm, said in cases:
        with pytest.raises(ValueError, match=said):
            ThreadWorld(2).run(partial(worker, make=make, algorithm=algorithm))


def first_entries(x: Tensor, k: int) -> Tensor:
    """A selection that ignores magnitudes."""
    return torch.arange(k)


def test_a_selection_of_the_user_decides_what_is_sent() -> None:
    algorithm = offbeat.lags(0.05, selection=first_entries)
    assert "selection=first_entries" in repr(algorithm), "ranks compare reprs: no address"

    def worker(world: World) -> tuple[Tensor, Tensor]:
        model = nn.Linear(40, 1, bias=False)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        model.weight.grad = None
        model(torch.arange(40.0)).sum().backward()
        assert model.weight.grad is not None
        found = model.weight.grad.clone(), _saved(replica)["residual"]["weight"].clone()
        replica.step()
        replica.detach()
        return found

    for sent, residual in ThreadWorld(2).run(worker):
        assert sent.nonzero()[:, 1].tolist() == [1], "two entries, of which the first is 0"
        assert torch.equal((sent + residual)[0], torch.arange(40.0))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([3, 3], r"1 different indices of \[0, 40\), expected 2"),
        ([-1, 3], r"2 different indices of \[0, 40\)"),
        ([1], "expected .2,."),
        ([1.0, 2.0], "float32"),
    ],
)
@pytest.mark.fault("a selection function of the user returns an entry twice", "ValueError")
def test_a_selection_of_other_indices_is_an_error(found: list[float], said: str) -> None:
    select = each_block(lambda x, k: torch.tensor(found))
    with pytest.raises(ValueError, match=said):
        select(torch.ones(40), [(0, 40, 2)])


@pytest.mark.fault(
    "a selection function of the user misses a NaN",
    "the gradient becomes NaN on all ranks",
)
def test_a_selection_that_misses_a_nan_does_not_hide_it() -> None:
    def worker(world: World) -> bool:
        model = nn.Linear(40, 1, bias=False)
        algorithm = offbeat.lags(0.05, selection=first_entries)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        x = torch.ones(40)
        x[30] = torch.nan if world.rank == 1 else 1.0
        model(x).sum().backward()
        assert model.weight.grad is not None
        broken = bool(model.weight.grad.isnan().all())
        replica.step()
        replica.detach()
        return broken and not _saved(replica)["residual"]["weight"].any()

    assert ThreadWorld(2).run(worker) == [True, True]


@pytest.mark.parametrize("given", [("optimizer",), ("scaler",)])
@pytest.mark.fault(
    "lags gets no optimizer= or no scaler=",
    "a note in stats()",
    group="Settings and arguments",
)
def test_notes_what_was_not_given(given: tuple[str, ...]) -> None:
    def worker(world: World) -> list[str]:
        model = Quadratic()
        could = {
            "optimizer": SGD(model.parameters(), lr=0.1),
            "scaler": torch.amp.GradScaler("cpu"),
        }
        replica = offbeat.replicate(
            model, offbeat.lags(), mesh=world, **{name: could[name] for name in given}
        )
        notes: list[str] = replica.stats()["notes"]
        replica.detach()
        return notes

    for notes in ThreadWorld(2).run(worker):
        found = {name for name in ("optimizer", "scaler") if any(f"no {name}=" in n for n in notes)}
        assert found == {"optimizer", "scaler"} - set(given)


def test_a_missing_optimizer_inside_a_node_is_an_error_in_all_nodes() -> None:
    algorithm = offbeat.Algorithm(gradients=TopK(units="lr", over="local"))

    def work(world: World) -> str:
        model = Quadratic()
        given = None if world.rank == 3 else SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="rank 3: units='lr' needs") as raised:
            offbeat.replicate(model, algorithm, mesh=world, optimizer=given)
        return str(raised.value)

    assert len(set(ThreadWorld(4, nodes=[(0, 1), (2, 3)]).run(work))) == 1
