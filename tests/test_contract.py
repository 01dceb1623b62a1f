"""What every recipe promises, in worlds of threads with real Gloo groups."""

import copy
import io
import random
import threading
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.testing import ThreadWorld, simulate, snapshot
from offbeat.transport.world import World
from problems import DIMENSION, START, Quadratic, flat, gradient, loss, optimum
from recipe_cases import CASES, Case, every_recipe, every_repeatable_recipe, of_each_recipe

LR, STEPS = 0.1, 20


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=LR, momentum=0.9)


@every_recipe
def test_world_of_one_is_plain_training(case: Case) -> None:
    plain = Quadratic(torch.float32)
    optimizer = Adam(plain.parameters(), lr=LR)
    for _ in range(5):
        loss(plain, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    (run,) = simulate(
        case.algorithm,
        lambda: Quadratic(torch.float32),
        loss,
        steps=5,
        size=1,
        optimizer=lambda parameters: Adam(parameters, lr=LR),
    )
    assert all(torch.equal(run[-1][name], p) for name, p in plain.named_parameters())


@every_repeatable_recipe
def test_follows_the_reference(case: Case) -> None:
    check_against_the_reference(case, 3, case.reference, Quadratic, loss, gradient)


@every_repeatable_recipe
@pytest.mark.fault(
    "ranks are delayed at random",
    "the same parameters bit for bit",
    group="Lost ranks and connections",
)
def test_delays_and_micro_batches_change_nothing(case: Case, draws: random.Random) -> None:
    """Four ranks, which follow the reference without them too."""
    ours = check_against_the_reference(case, 4, case.reference, Quadratic, loss, gradient, steps=8)
    table = [[draws.choice([0, 0, 0.01]) for _ in range(8)] for _ in range(4)]

    def worker(world: World) -> np.ndarray:
        model = Quadratic()
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        optimizer = sgd(model.parameters())
        for step, pause in enumerate(table[world.rank]):
            time.sleep(pause)
            for share in (0.25, 0.25, 0.5):  # powers of two, whose sums are exact
                replica.set_requires_sync(share == 0.5)
                (loss(model, world.rank, step) * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.detach()
        return flat(snapshot(model))

    np.testing.assert_array_equal(ThreadWorld(nodes=case.nodes(4)).run(worker), ours[8])


def check_against_the_reference(
    case: Case, size: int, reference: Any, model: Any, loss: Any, gradient: Any, steps: int = STEPS
) -> np.ndarray:
    """Compare every step; without a reference the clock decides, and numbers are to be finite."""
    nodes = case.nodes(size)
    runs = simulate(case.algorithm, model, loss, steps=steps, nodes=nodes, optimizer=sgd)
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    assert not case.agrees or (ours == ours[:, :1]).all(), "ranks hold one model after every step"
    if reference is None:
        assert np.isfinite(ours).all()
        return ours
    theirs = reference(START, gradient, nodes=nodes, steps=steps, lr=LR, momentum=0.9)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=case.tolerance)
    return ours


@pytest.mark.parametrize(
    "case", of_each_recipe(c for c in CASES if c.averages and c.reference), ids=lambda c: c.text
)
def test_converges_although_every_rank_has_its_own_optimum(case: Case) -> None:
    """With steps of 1/k every method reaches the optimum of the mean loss."""
    size = 4
    nodes = ((0, 1), (2, 3)) if case.hierarchical else case.nodes(size)

    def worker(world: World) -> np.ndarray:
        model = Quadratic()
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=1.0)
        for k in range(case.settles):
            optimizer.param_groups[0]["lr"] = 1.0 / (k + 2)
            error = loss(model, world.rank, k)
            replica.report_loss(error)  # daso warns if nobody does
            error.backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.finish()
        replica.detach()
        return flat(snapshot(model))

    for found in ThreadWorld(nodes=nodes).run(worker):
        # k steps of 1/k leave about 1/k of the start's distance, 1.8; the ranks' own are 0.9 away.
        np.testing.assert_allclose(found, optimum(size), atol=5 / case.settles)


@pytest.mark.parametrize("case", [c for c in CASES if c.mixes], ids=lambda c: c.text)
def test_mixing_conserves_the_mean_and_brings_ranks_together(case: Case) -> None:
    nodes = case.nodes(4)
    heads = [node[0] for node in nodes]  # a node's ranks hold one model

    def worker(world: World) -> list[np.ndarray]:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        with torch.no_grad():
            model.matrix += world.node
        seen = [flat(snapshot(model))]
        for _ in range(12):
            replica.step()
            seen.append(flat(snapshot(model)))
        replica.detach()
        return seen

    # A step without a backward is what mixing alone needs; Mean warns that it is unusual.
    with pytest.warns() if case.hierarchical else nullcontext():
        runs = np.array(ThreadWorld(nodes=nodes).run(worker))[heads]
    # Each exchange rounds once: half a unit in the last place of numbers up to 4.
    rounding = 12 * 4 * torch.finfo(torch.float32).eps
    np.testing.assert_allclose(runs.mean(0)[0], runs.mean(0)[-1], atol=rounding)
    assert np.ptp(runs[:, -1], axis=0).max() < 0.02 * np.ptp(runs[:, 0], axis=0).max() + rounding


UNIT = 2.0**-7  # the spacing of bfloat16 numbers from 1 to 2


class Ones(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(7, dtype=dtype))
        self.b = nn.Parameter(torch.ones(5, dtype=dtype))


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.algorithm.parameters is not None], ids=lambda c: c.text
)
def test_16_bit_parameters_make_the_progress_of_float32(case: Case) -> None:
    """One of n nodes moves by one unit in the last place at a time, the mean by 1/n of that."""
    nodes = ((0, 1), (2, 3)) if case.hierarchical else case.nodes(4)

    def progress(world: World, dtype: torch.dtype) -> float:
        model = Ones(dtype)
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        for step in range(12):
            (0 * (model.a.sum() + model.b.sum())).backward()
            with torch.no_grad():
                for parameter in replica.owned_parameters():
                    parameter += UNIT * (step % len(nodes) == world.node)
            replica.step()
        with replica.consensus():
            moved = (model.a.double().mean().item() - 1) / UNIT
        replica.detach()
        return moved

    both = ThreadWorld(nodes=nodes).run(
        lambda world: [progress(world, dtype) for dtype in (torch.float32, torch.bfloat16)]
    )
    exact = both[0][0]
    np.testing.assert_allclose([rounded for _, rounded in both], exact, rtol=0, atol=1.0)
    if case.mixes and not case.text.startswith("daso"):  # whose eq. 1 slows all progress down
        assert exact == pytest.approx(12 / len(nodes), abs=0.1)


@every_recipe
@pytest.mark.fault(
    "a rank skips its optimizer step",
    "training goes on; finish() makes ranks equal",
    group="Gradients",
)
@pytest.mark.fault(
    "detach() is called twice, then the model is trained on alone",
    "no thread and no hook is left",
    group="Leaving",
)
@pytest.mark.filterwarnings("ignore:rank .* keeps them equal:RuntimeWarning")
def test_a_run_from_attach_to_detach(case: Case) -> None:
    before = threading.active_count()

    def worker(world: World) -> dict[str, torch.Tensor]:
        model = Quadratic(torch.float32, vector=torch.bfloat16)
        kinds = {name: (t.dtype, t.device, t.shape) for name, t in model.state_dict().items()}
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        optimizer = sgd(model.parameters())
        for step in range(4):
            loss(model, world.rank, step).backward()
            if not (world.rank == 1 and step in (1, 2)):  # as GradScaler does after an overflow
                optimizer.step()
            optimizer.zero_grad()
            replica.step()
        shown = _finish(model, replica, world.rank)
        replica.install(optimizer)
        loss(model, world.rank, 4).backward()
        optimizer.step()
        assert replica.steps == 5
        now = {name: (t.dtype, t.device, t.shape) for name, t in model.state_dict().items()}
        assert list(now.items()) == list(kinds.items())
        assert all(p.isfinite().all() for p in model.parameters())
        _detach(model, replica, optimizer)
        return shown

    first, *others = ThreadWorld(nodes=case.nodes(4)).run(worker)
    assert first["mean"].tolist() == [1.5, 1.5]
    assert first["count"].item() == 7
    for other in others:
        assert all(torch.equal(t, first[name]) for name, t in other.items())
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def _finish(model: Quadratic, replica: offbeat.Replica, rank: int) -> dict[str, torch.Tensor]:
    """Make ranks equal, buffers too, to the average that consensus() shows without a trace."""
    model.mean += rank
    model.count += rank + 7
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with replica.consensus():
        shown = {name: t.clone() for name, t in model.state_dict().items()}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    replica.finish()
    assert all(torch.equal(t, shown[name]) for name, t in model.state_dict().items())
    assert replica.consensus_distance() == {"mean": 0.0, "max": 0.0}
    return shown


def _detach(model: Quadratic, replica: offbeat.Replica, optimizer: SGD) -> None:
    """Leave a model that trains on alone, and can be saved and copied."""
    replica.detach()
    replica.detach()
    optimizer.step()
    loss(model, 0, 0).backward()
    assert replica.steps == 5
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    with pytest.raises(ValueError, match="after detach"):
        replica.step()
    torch.save(model, io.BytesIO())
    copy.deepcopy(model)


@every_repeatable_recipe
@pytest.mark.fault(
    "a run stops and resumes from a checkpoint",
    "continues bit for bit, per rank",
    group="Checkpoints",
)
def test_save_load_continue_equals_never_having_stopped(case: Case) -> None:
    def worker(world: World) -> None:
        model = Quadratic(torch.float32, vector=torch.bfloat16)
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        optimizer = Adam(model.parameters(), lr=LR)
        train(model, replica, world.rank, optimizer, steps=4)
        model.mean += world.rank
        file = io.BytesIO()
        parts = {"replica": replica, "model": model, "optimizer": optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        train(model, replica, world.rank, optimizer, steps=5)
        replica.detach()

        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again = Quadratic(torch.float32, vector=torch.bfloat16)
        again.load_state_dict(saved["model"])
        resumed = offbeat.replicate(again, case.algorithm, mesh=world)  # takes rank 0's model
        resumed.load_state_dict(saved["replica"])
        optimizer = Adam(again.parameters(), lr=LR)
        optimizer.load_state_dict(saved["optimizer"])
        assert torch.equal(again.mean, saved["model"]["mean"])
        train(again, resumed, world.rank, optimizer, steps=5)
        assert resumed.steps == 9
        resumed.detach()
        for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        assert torch.equal(again.mean, model.mean)

    ThreadWorld(nodes=case.nodes(4)).run(worker)


def train(
    model: nn.Module, replica: offbeat.Replica, rank: int, optimizer: Any, steps: int
) -> None:
    for step in range(steps):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def test_the_problem_is_not_trivial() -> None:
    assert np.abs(START - optimum(4)).max() > 0.5
    assert START.shape == (DIMENSION,)


@pytest.mark.parametrize("case", of_each_recipe(CASES), ids=lambda c: c.text)
def test_evaluations_in_inference_mode_and_another_default_device(case: Case) -> None:
    """Frameworks evaluate in inference mode, and scripts set a default device."""

    def worker(world: World) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.device("meta"):  # a tensor that lands there by default cannot be read
            replica = offbeat.replicate(model, case.algorithm, mesh=world)
        for step in range(6):
            loss = model(torch.ones(4)).sum()
            with torch.device("meta"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.device("meta"):
                replica.step()
            with torch.inference_mode():
                with replica.consensus():
                    model(torch.ones(4))
                if step == 2:
                    replica.finish()
                    replica.load_state_dict(replica.state_dict())
        with torch.device("meta"):
            replica.finish()
            replica.consensus_distance()

    ThreadWorld(nodes=((0,), (1,))).run(worker)
