"""Schedules: one method after another, as text, saved and resumed."""

import itertools
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD

import offbeat
from offbeat.testing import ThreadWorld, simulate, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from reference.ddp import ddp
from reference.local_sgd import local_sgd
from reference.participants import Array
from reference.switched import Part, switched

TEXT = "ddp for 4 steps, then lags(density=0.2) for 4 steps, then local_sgd(every=2)"
BACK = "sgp(overlap=1) for 4 steps, then ddp for 4 steps, then local_sgd(every=2)"


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def test_post_local_sgd_follows_the_reference() -> None:
    algorithm = offbeat.algorithm("ddp for 6 steps, then local_sgd(every=3)")
    nodes = ((0,), (1,), (2,))
    runs = simulate(algorithm, Quadratic, loss, steps=14, nodes=nodes, optimizer=sgd)
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)

    def local(*args: Any, **given: Any) -> Array:
        return local_sgd(*args, every=3, **given)

    given = {"nodes": nodes, "at": 6, "steps": 14, "lr": 0.1, "momentum": 0.9}
    theirs = switched(Part(ddp, 2), Part(local), START, gradient, **given)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ddp, then sgp", "cannot read 'ddp' in"),
        ("ddp for 2 steps, then sgp for 3 steps", "sgp for 3 steps"),
        ("ddp for 0 steps, then sgp", "1 or more, and increase"),
        ("ddp for 9 steps, then lags until step 8, then sgp", "and increase"),
    ],
)
def test_what_is_no_schedule(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        offbeat.algorithm(text)


def test_a_schedule_can_be_read_again() -> None:
    algorithm = offbeat.algorithm(TEXT)
    assert offbeat.algorithm(str(algorithm)) == algorithm == offbeat.algorithm(repr(algorithm))
    assert [phase.end for phase in algorithm.phases] == [4, 8, 0]


@pytest.mark.parametrize(
    ("text", "at", "phases"),
    [
        *((TEXT, at, ["lags", "TopK", "local_sgd"]) for at in (2, 4, 6, 8, 9, 11)),
        *((BACK, at, ["local_sgd", "ddp", "local_sgd"]) for at in (3, 4, 5, 7, 9)),
    ],
)
def test_a_schedule_resumes_in_any_phase(text: str, at: int, phases: list[str]) -> None:
    """Also right before a switch, right after one, and while residuals are sent."""

    def work(world: World) -> tuple[Array, Array, list[str]]:
        model, other = Quadratic(), Quadratic()
        optimizer, resumed = sgd(model.parameters()), sgd(other.parameters())
        algorithm = offbeat.algorithm(text)
        replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
        train(replica, optimizer, at)
        saved = replica.state_dict(), deepcopy(optimizer.state_dict()), snapshot(model)
        train(replica, optimizer, 13 - at)
        end = flat(snapshot(model))
        replica.detach()
        other.load_state_dict(saved[2], strict=False)
        again = offbeat.replicate(other, algorithm, mesh=world, optimizer=resumed)
        resumed.load_state_dict(saved[1])
        again.check_state_dict(saved[0])
        again.load_state_dict(saved[0])
        train(again, resumed, 13 - at)
        names = [switch["algorithm"].partition("(")[0] for switch in replica.stats()["switches"]]
        again.detach()
        return end, flat(snapshot(other)), names

    for end, after, names in ThreadWorld(3).run(work):
        # The first step of ddp() sums buckets in another order: where that shows, to rounding.
        np.testing.assert_allclose(end, after, rtol=0, atol=1e-15 if text == BACK else 0)
        assert names == phases


@pytest.mark.parametrize("verb", ["load_state_dict", "check_state_dict", "damaged"])
def test_a_state_of_another_phase_moves_nothing_before_it_is_loaded(verb: str) -> None:
    """A switch would average optimizers that the second phase keeps equal inside a node."""
    text = "local_sgd(every=2) for 2 steps, then sgp(overlap=1, within='local')"

    def work(world: World) -> None:
        model = Quadratic()
        optimizer = sgd(model.parameters())
        given = {"mesh": world, "optimizer": optimizer}
        replica = offbeat.replicate(model, offbeat.algorithm(text), **given)
        train(replica, optimizer, 1)
        early = replica.state_dict(), snapshot(model), deepcopy(optimizer.state_dict())
        train(replica, optimizer, 4)
        later, own = replica.state_dict(), momentum(optimizer)
        place = flat(snapshot(model))
        replica.load_state_dict(early[0])
        optimizer.load_state_dict(early[2])
        assert str(replica.algorithm).startswith("local_sgd")
        before = flat(snapshot(model)), momentum(optimizer)
        if verb == "load_state_dict":
            replica.load_state_dict(later)
            assert np.array_equal(flat(snapshot(model)), place)
        elif verb == "check_state_dict":
            replica.check_state_dict(later)
        else:
            next(iter(later.values()))["model"]["matrix"][0] = 7.0
            with pytest.raises(ValueError, match="checksum"):
                replica.load_state_dict(later)
        assert np.array_equal(momentum(optimizer), before[1])
        if verb != "load_state_dict":
            assert np.array_equal(flat(snapshot(model)), before[0])
            assert str(replica.algorithm).startswith("local_sgd")
            assert len(replica.stats()["switches"]) == 2
        replica.detach()
        assert not np.array_equal(own, before[1])

    ThreadWorld(nodes=((0,), (1,))).run(work)


def momentum(optimizer: SGD) -> Array:
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    return np.concatenate([buffer.flatten().numpy() for buffer in buffers])


def train(replica: offbeat.Replica, optimizer: SGD, steps: int) -> None:
    for _ in itertools.repeat(None, steps):
        loss(replica.model, replica.world.rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
