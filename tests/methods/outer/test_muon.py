"""Muon and AdamW together inside DiLoCo (MuLoCo), beside a reference of the outer step."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import offbeat
from crowd import Crowd
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import seeded

EVERY, STEPS, RANKS = 3, 12, 3
OUTER_LR, MOMENTUM = 0.7, 0.9


def net() -> nn.Module:
    """Two matrices for Muon, and biases for AdamW."""
    return seeded(0, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))).double()


def inner(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [Muon(matrices, 0.05, adjust_lr_fn="match_rms_adamw"), AdamW(others, 0.05)]


def step(model: nn.Module, optimizers: list[Optimizer], rank: int, k: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * k + rank)).double()
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def expected() -> list[list[np.ndarray]]:
    """Delta = a - mean x;  v = m v + Delta;  a -= lr (Delta + m v): Nesterov, as x of all ranks."""
    models = [net() for _ in range(RANKS)]
    optimizers = [inner(model) for model in models]
    anchor = flat(models[0])
    velocity, history = np.zeros_like(anchor), []
    for k in range(STEPS):
        for rank, (model, each) in enumerate(zip(models, optimizers, strict=True)):
            step(model, each, rank, k)
        if (k + 1) % EVERY == 0:
            delta = anchor - np.mean([flat(model) for model in models], axis=0)
            velocity = MOMENTUM * velocity + delta
            anchor = anchor - OUTER_LR * (delta + MOMENTUM * velocity)
            for model in models:
                nn.utils.vector_to_parameters(torch.tensor(anchor), model.parameters())
        history.append([flat(model) for model in models])
    return history


def test_muloco_follows_its_reference_and_resumes() -> None:
    def work(world: World) -> list[np.ndarray]:
        model, seen = net(), []
        optimizers = inner(model)
        algorithm = offbeat.diloco(every=EVERY)
        replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizers)
        for k in range(STEPS):
            if k == 7:  # between two exchanges
                saved = [each.state_dict() for each in (replica, *optimizers)]
                again = net()
                again.load_state_dict(model.state_dict())
                replica.detach()
                model, optimizers = again, inner(again)
                replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizers)
                for each, state in zip((replica, *optimizers), saved, strict=True):
                    each.load_state_dict(state)
            step(model, optimizers, world.rank, k)
            replica.step()
            seen.append(flat(model))
        replica.detach()
        return seen

    # Muon orthogonalizes in bfloat16: equal inputs give equal updates, and rounding of the outer
    # step in float64 is far below what that sees.
    ours = np.array(ThreadWorld(RANKS).run(work)).swapaxes(0, 1)
    np.testing.assert_allclose(ours, expected(), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_joins_gets_the_states_of_both_optimizers() -> None:
    def work(world: World) -> tuple[int, list[Tensor]]:
        model = net()
        optimizers = inner(model)
        replica = offbeat.replicate(
            model, offbeat.local_sgd(every=1), mesh=world, optimizer=optimizers, elastic=True
        )
        joined = replica.steps > 0
        if joined:
            states = [each.state[p] for each in optimizers for p in each.param_groups[0]["params"]]
            found = [t for state in states for t in state.values() if isinstance(t, Tensor)]
            kept = [t.clone() for t in found]
        while not replica.joined or replica.steps < replica.joined[0]["step"] + 20:
            step(model, optimizers, world.rank, replica.steps)
            replica.step()
        replica.finish()
        replica.detach()
        return joined, kept if joined else []

    crowd = Crowd(2, work)
    crowd.come(crowd.world.newcomer(), after=0.2)
    results = crowd.all()
    (found,) = [kept for joined, kept in results if joined]
    assert len(found) == 2 + 2 * 3  # momentum of a matrix; two moments and a step of a bias
    assert all(t.abs().sum() > 0 for t in found)
