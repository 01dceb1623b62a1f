"""Ranks whose steps stand for different numbers of samples."""

import io
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import offbeat
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from outcomes import alike, errors_of
from problems import START, Quadratic, flat, gradient, loss
from reference import weighted
from reference.participants import Array
from reference.push_sum import complete, one_peer_exponential, ring

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

STEPS, LR, MOMENTUM = 12, 0.1, 0.9
PARTS = (slice(0, 6), slice(6, 9))  # the fragments of the quadratic: `matrix` and `vector`
CASES: dict[str, Callable[..., Array]] = {
    "ddp": weighted.ddp,
    "lags(density=1.0)": weighted.ddp,
    "local_sgd(every=1)": partial(weighted.local_sgd, every=1),
    "local_sgd(every=3)": partial(weighted.local_sgd, every=3),
    "diloco(every=3)": partial(weighted.diloco, every=3),
    "diloco(every=3, fragments=2)": partial(weighted.diloco, every=3, fragments=PARTS),
    "diloco(every=3, fragments=2, delay=1)": partial(
        weighted.diloco, every=3, fragments=PARTS, delay=1, mixing=0.5
    ),
    "adasum": partial(weighted.adasum, every=1, layers=(6, 3)),
    "adasum(every=3, method='rvhdd')": partial(weighted.adasum, every=3, layers=(6, 3)),
    "sgp": partial(weighted.sgp, matrix=one_peer_exponential),
    "sgp('ring', overlap=1)": partial(weighted.sgp, matrix=ring, overlap=1),
    "sgp(overlap=2)": partial(weighted.sgp, matrix=one_peer_exponential, overlap=2),
    "sgp('complete')": partial(weighted.sgp, matrix=complete),
    "d_psgd": partial(weighted.sgp, matrix=ring),
    "daso(every=4, wait=2)": partial(weighted.daso, every=4, wait=2),
}


def train(world: World, text: str, samples: Array, **more: Any) -> tuple[Array, Array]:
    """Return the models of all steps, and that after finish()."""
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    replica = offbeat.replicate(
        model, offbeat.algorithm(text), mesh=world, weighted=True, optimizer=optimizer, **more
    )
    history = [flat(snapshot(model))]
    for k, weights in enumerate(samples):
        replica.set_weight(weights[world.rank])
        error = loss(model, world.rank, k)
        replica.report_loss(error)
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        history.append(flat(snapshot(model)))
    replica.finish()
    replica.detach()
    return np.stack(history), flat(snapshot(model))


def drawn(draws: random.Random, size: int) -> Array:
    """Weights of all steps: some are 0, and all of a step never."""
    rows = [[draws.choice((0, 0.5, 1, 2, 3)) for _ in range(size)] for _ in range(STEPS)]
    samples = np.array(rows, dtype=np.float64)
    samples[:, 0] += 0.25
    return samples


@pytest.mark.parametrize("text", CASES)
def test_follows_the_reference(text: str, draws: random.Random) -> None:
    size = 4 if "sgp" in text else 3  # of graphs, one whose ranks send to others in turn
    samples = drawn(draws, size)
    runs = ThreadWorld(size).run(lambda world: train(world, text, samples)[0])
    theirs = CASES[text]((START, gradient, samples), LR, MOMENTUM)
    # Only the order of sums differs.
    np.testing.assert_allclose(np.array(runs).swapaxes(0, 1), theirs, rtol=0, atol=1e-12)


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3).sin()
Y = X.square().sum(1, keepdim=True)
BATCHES = (slice(0, 4), slice(4, 6), slice(6, 8))  # 2:1:1
LINEAR = (
    "ddp",
    "lags(density=1.0)",
    "slgs(density=1.0)",
    "local_sgd(every=1)",
    "diloco(every=1, lr=1.0, momentum=0.0, nesterov=False)",
    "sparse_loco(every=1, lr=1.0, density=1.0, decay=1.0, bits=None)",
    "sgp('complete')",
    "sgp('complete', outer='SGD(lr=1.0)', outer_every=2)",
    "d_psgd('complete')",
    "local_sgd(every=1, within='local')",
    "sgp('complete', within='local')",
    "daso(total_steps=6, warmup_steps=3, cooldown_steps=3, wire=None)",
)


def line(dtype: torch.dtype = torch.float64) -> nn.Module:
    model = nn.Linear(3, 1, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25, 0.75]]))
        model.bias.fill_(0.125)
    return model


def fit(model: nn.Module, part: slice, step: Callable[[], None], before: Any = len) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        before(X[part])
        (model(X[part].to(next(model.parameters()))) - Y[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step()


@pytest.mark.parametrize("text", LINEAR)
def test_batches_of_2_1_1_equal_the_whole_batch(text: str) -> None:
    whole = line()
    fit(whole, slice(None), lambda: None)

    def worker(world: World) -> list[torch.Tensor]:
        model = line()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, weighted=True)
        fit(model, BATCHES[world.rank], replica.step, lambda x: replica.set_weight(len(x)))
        replica.finish()
        replica.detach()
        return [p.detach() for p in model.parameters()]

    inside = "within" in text or "daso" in text
    for run in ThreadWorld(nodes=[[0, 1], [2]] if inside else [[0], [1], [2]]).run(worker):
        for ours, theirs in zip(run, whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ["lags(density=0.2)", "sparse_loco(every=1, lr=1.0, decay=1.0)"])
def test_what_is_not_sent_counts_by_the_weight_of_its_step(text: str, draws: random.Random) -> None:
    """v - x = (1/P) sum of residuals, where x is fed the weighted means of the same gradients."""
    size, samples = 3, drawn(draws, 3)
    samples[-1] = 1.0

    def worker(world: World) -> tuple[Array, Array, Array]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=LR)
        replica = offbeat.replicate(
            model, offbeat.algorithm(text), mesh=world, weighted=True, optimizer=optimizer
        )
        changes = []
        for k, weights in enumerate(samples):
            replica.set_weight(weights[world.rank])
            changes.append(-LR * gradient(world.rank, flat(snapshot(model)), k))
            loss(model, world.rank, k).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        state = replica.state_dict()[f"rank{world.rank}"]
        replica.detach()
        kept = (
            state["gradients"]["residual"]
            if text.startswith("lags")
            else state["parameters"]["0"]["errors"]["sent"]
        )
        return flat(snapshot(model)), flat(kept), np.stack(changes)

    runs = ThreadWorld(size).run(worker)
    shares = samples / samples.sum(axis=1, keepdims=True)
    moved = sum(shares[:, r, None] * changes for r, (*_, changes) in enumerate(runs)).sum(axis=0)
    left = np.mean([kept for _, kept, _ in runs], axis=0)
    np.testing.assert_allclose(runs[0][0] - left, START + moved, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "text", ["ddp", "local_sgd(every=1)", "diloco(every=1, lr=1.0, momentum=0.0, nesterov=False)"]
)
def test_means_of_16_bit_parameters(text: str) -> None:
    """Shares multiply in float32: the mean of equal models is that model, bit for bit."""

    def worker(world: World) -> bool:
        model = line(torch.bfloat16)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, weighted=True)
        replica.set_weight((3, 1, 7)[world.rank])
        model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        replica.step()
        replica.detach()
        alone = line(torch.bfloat16)
        alone(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        same = zip(model.parameters(), alone.parameters(), grads, strict=True)
        return all(torch.equal(p, q) and torch.equal(g, q.grad) for p, q, g in same)

    assert ThreadWorld(3).run(worker) == [True] * 3


@pytest.mark.parametrize("text", ["sgp", "sgp(weighted_updates=True)", "sgp('ring', overlap=1)"])
def test_equal_weights_change_nothing(text: str) -> None:
    (ones, _), *_ = ThreadWorld(3).run(lambda world: train(world, text, np.ones((6, 3))))
    (many, _), *_ = ThreadWorld(3).run(lambda world: train(world, text, np.full((6, 3), 32.0)))
    np.testing.assert_allclose(many, ones, rtol=1e-12)


@pytest.mark.parametrize("overlap", [0, 1])
def test_weights_lose_nothing_of_16_bit_parameters(overlap: int) -> None:
    """Without updates the mean of all stays, to a hundredth of what rounding takes."""

    def work(world: World) -> list[Array]:
        model = nn.Linear(64, 1, bias=False).bfloat16()
        replica = offbeat.replicate(model, offbeat.sgp(overlap=overlap), mesh=world, weighted=True)
        replica.set_weight(32)
        noise = torch.randn(64, generator=torch.Generator().manual_seed(world.rank)) / 20
        with torch.no_grad():
            model.weight.copy_(torch.linspace(1, 2, 64) + noise)
        masses = []
        for _ in range(8):
            replica.step()
            (numerator,), _, weight = replica.parameters.mass()
            masses.append(np.array([*numerator.double(), weight]))
        replica.detach()
        return masses

    totals = [sum(masses) for masses in zip(*ThreadWorld(4).run(work), strict=True)]
    means = [total[:-1] / total[-1] for total in totals]
    assert max(np.abs(mean - means[0]).max() for mean in means) < 1e-2 * 2**-8


@pytest.mark.parametrize("text", ["lags(density=0.1)", "slgs(density=0.1)", "ddp"])
def test_a_rank_without_samples_keeps_earlier_parts_of_a_step(text: str) -> None:
    """Of two backwards that both exchange, the second result holds the first."""

    def work(world: World) -> list[float]:
        weight = nn.Parameter(torch.zeros(40))
        algorithm, model = offbeat.algorithm(text), nn.ParameterList([weight])
        replica = offbeat.replicate(model, algorithm, mesh=world, weighted=True)
        replica.set_weight((1, 0)[world.rank])
        for entry in range(2):
            (weight[entry] * (1 + entry)).backward()
        assert weight.grad is not None
        found = weight.grad[:3].tolist()
        replica.detach()
        return found

    assert ThreadWorld(2).run(work) == [[1.0, 2.0, 0.0]] * 2


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_velocities_of_ranks_without_samples_are_sent(density: float) -> None:
    r""":math:`v = v/2 + \sum_i s_i g_i`, also of layers that are sent whole."""

    def work(world: World) -> list[float]:
        weight = nn.Parameter(torch.zeros(8))
        algorithm, model = offbeat.lags(density=density, momentum=0.5), nn.ParameterList([weight])
        optimizer, found = SGD([weight], lr=LR), list[float]()
        given: Any = {"mesh": world, "optimizer": optimizer, "weighted": True}
        replica = offbeat.replicate(model, algorithm, **given)
        for step in range(4):
            replica.set_weight(1 if step < 2 or world.rank == 0 else 0)
            (weight[0] * (1.0, 3.0)[world.rank]).backward()
            assert weight.grad is not None
            found.append(weight.grad[0].item())
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.detach()
        return found

    for found in ThreadWorld(2).run(work):
        np.testing.assert_allclose(found, [2.0, 3.0, 2.5, 2.25], rtol=1e-6)


@pytest.mark.parametrize("text", ["sgp", "sgp(overlap=1)", "d_psgd", "local_sgd(every=2)"])
def test_an_average_between_two_steps_has_the_whole_update(text: str) -> None:
    """After the optimizer's step and before that of the replica."""

    def work(world: World) -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        model = nn.ParameterList([weight])
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, weighted=True)
        replica.set_weight(32)
        found = list[float]()
        for _ in range(3):
            with torch.no_grad():
                weight.sub_(1.0)
            with replica.consensus():
                found.append(weight.item())
            replica.step()
        with torch.no_grad():
            weight.sub_(1.0)
        replica.finish()
        replica.detach()
        return [*found, weight.item()]

    for found in ThreadWorld(2).run(work):
        np.testing.assert_allclose(found, [-1.0, -2.0, -3.0, -4.0], rtol=1e-6)


def test_a_weight_for_the_next_step_leaves_the_average_as_it_is() -> None:
    def work(world: World) -> float:
        weight = nn.Parameter(torch.zeros(1))
        model, sgp = nn.ParameterList([weight]), offbeat.sgp(every=9)
        replica = offbeat.replicate(model, sgp, mesh=world, weighted=True)
        replica.set_weight(32)
        with torch.no_grad():
            weight.fill_(float(world.rank))
        replica.step()
        replica.set_weight(1 + 99 * world.rank)
        with replica.consensus():
            found = weight.item()
        replica.detach()
        return found

    assert ThreadWorld(2).run(work) == [0.5, 0.5]


def test_residuals_of_one_rank_alone_count_in_16_bits_too() -> None:
    """In layers sent whole, with weights: a receiver does to all that arrives the same."""

    def work(world: World, dtype: torch.dtype) -> list[float]:
        weight = nn.Parameter(torch.zeros(40, dtype=dtype))
        model, lags = nn.ParameterList([weight]), offbeat.lags(density=0.1)
        replica = offbeat.replicate(model, lags, mesh=world, weighted=True)
        replica.set_weight((1, 3)[world.rank])
        for step in range(2):
            gradient = torch.arange(40, dtype=dtype) * (world.rank == 0 or step == 1)
            (weight * gradient).sum().backward()
            if step == 0:
                weight.grad = None
                replica.step()
                replica.switch("lags(density=1.0)")
        assert weight.grad is not None
        found = weight.grad.float().tolist()
        replica.detach()
        return found

    exact, _ = ThreadWorld(2).run(partial(work, dtype=torch.float32))
    for found in ThreadWorld(2).run(partial(work, dtype=torch.bfloat16)):
        np.testing.assert_allclose(found, exact, rtol=2e-2)  # two casts, of 2^-9 each


def test_fractions_of_samples_leave_no_window() -> None:
    """Sums of 0.17 and the like are rounded: after an exchange nothing may be left of them."""
    samples = np.array(
        [[0.17, 0.87, 8.95, 4.42], [0.22, 0.03, 0.89, 1.9], [0.08, 0.04, 2.33, 0.63]]
    )
    samples = np.array(
        [*samples, [8.08, 3.42, 9.26, 5.81]]
    ).T  # something is left on the first rank

    def work(world: World) -> tuple[Array, Array]:
        model = Quadratic()
        recipe = offbeat.noloco(every=2)
        replica = offbeat.replicate(model, recipe, mesh=world, weighted=True)
        for weights in samples:
            replica.set_weight(weights[world.rank])
            with torch.no_grad():
                next(model.parameters()).add_(world.rank)
            replica.step()
        own = flat(snapshot(model))
        replica.finish()
        replica.detach()
        return own, flat(snapshot(model))

    runs = ThreadWorld(4).run(work)
    mean = np.mean([own for own, _ in runs], axis=0)
    for _, finished in runs:
        np.testing.assert_allclose(finished, mean, rtol=1e-12)


@pytest.mark.parametrize(
    "text", ["local_sgd(every=4)", "diloco(every=4, delay=2)", "sgp('ring')", "adasum(every=4)"]
)
def test_resumes_inside_of_a_window(text: str, draws: random.Random) -> None:
    samples = drawn(draws, 3)
    whole = ThreadWorld(3).run(lambda world: train(world, text, samples)[1])

    def worker(world: World) -> Array:
        saved: Any = None
        for steps in (range(6), range(6, STEPS)):
            model = Quadratic()
            optimizer = SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
            replica = offbeat.replicate(
                model, offbeat.algorithm(text), mesh=world, weighted=True, optimizer=optimizer
            )
            if saved is not None:
                states = torch.load(saved)
                optimizer.load_state_dict(states[0])
                replica.load_state_dict(states[1])
            for k in steps:
                replica.set_weight(samples[k, world.rank])
                loss(model, world.rank, k).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
            saved = io.BytesIO()
            torch.save([optimizer.state_dict(), replica.state_dict()], saved)
            saved.seek(0)
            if steps.stop == STEPS:
                replica.finish()
            replica.detach()
        return flat(snapshot(model))

    for ours, theirs in zip(ThreadWorld(3).run(worker), whole, strict=True):
        assert (ours == theirs).all()


def test_losses_of_plateaus_are_weighted() -> None:
    def worker(world: World) -> tuple[float, float]:
        model = Quadratic()
        recipe = "daso(every=8, report_every=5)"
        replica = offbeat.replicate(model, offbeat.algorithm(recipe), mesh=world, weighted=True)
        replica.set_weight((3, 1)[world.rank])
        for _ in range(2):
            replica.report_loss((1.0, 5.0)[world.rank])
            replica.step()
        bound: Any = replica.parameters
        found = float(bound.loss), bound.losses
        replica.detach()
        return found

    assert ThreadWorld(2).run(worker) == [(6.0, 6.0), (10.0, 2.0)]


BAD: Sequence[tuple[str, Any, str]] = (
    ("a weight is negative", (2, -1.0), "rank 1: set_weight() got -1.0, expected how many"),
    ("a weight is NaN", (2, float("nan")), "rank 1: set_weight() got nan"),
    ("a weight is infinite", (2, float("inf")), "rank 1: set_weight() got inf"),
    ("a weight is no number", (2, "many"), "rank 1: set_weight() got 'many'"),
    ("all weights are 0", (0, 0), "the weights of all ranks are 0"),
    ("one rank gives no weight", (2, None), "rank 1 has not called set_weight()"),
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(*rest, id=what, marks=pytest.mark.fault(what, "ValueError on all ranks"))
        for what, *rest in BAD
    ],
)
@pytest.mark.parametrize(("text", "good"), [("ddp", 0), ("local_sgd(every=4)", 4), ("sgp", 0)])
def test_bad_weights_are_one_error(
    text: str, given: Sequence[Any], message: str, good: int
) -> None:
    """In the first step, or in a whole interval after that."""
    if good and None in given:
        return  # A weight stays until it is set again.

    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, weighted=True)
        try:
            for k in range(good + 4):
                weight = 1 + world.rank if k < good else given[world.rank]
                if weight is not None:
                    replica.set_weight(weight)
                loss(model, world.rank, k).backward()
                replica.step()
        finally:
            replica.detach()

    assert message in alike(worker)


def test_weights_are_declared_at_the_attach() -> None:
    def late(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        try:
            replica.set_weight(2) if world.rank else replica.step()
        finally:
            replica.detach()

    def unlike(world: World) -> None:
        offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world, weighted=world.rank == 0)

    def foreign(world: World) -> None:
        offbeat.replicate(Quadratic(), offbeat.algorithm("torch_ddp"), mesh=world, weighted=True)

    def nodes(world: World) -> None:
        model, recipe = Quadratic(), offbeat.algorithm("local_sgd(within='local')")
        offbeat.replicate(model, recipe, mesh=world, weighted=True, elastic=True)

    assert "weighted=True" in alike(late)
    assert "nodes that come and go count alike" in alike(nodes)
    assert "weighted is True here and False there" in alike(unlike)

    def gossip(world: World) -> None:
        recipe = offbeat.ad_psgd()
        replica = offbeat.replicate(Quadratic(), recipe, mesh=world, weighted=True)
        try:
            replica.set_weight(2)
        finally:
            replica.detach()

    assert "TorchDDP() counts all ranks alike" in alike(foreign)
    assert "whose steps wait for nobody" in str(errors_of(gossip, 2)[0])
