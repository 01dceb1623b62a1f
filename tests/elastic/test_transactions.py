"""A run that loses a rank goes on: its exchange is made again by the others, or kept by all.

The references are written apart: torch in one process, with the members of every exchange given.
"""

import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_survivors import (
    frames_of_victims,
    perish,
    quick,
    results_of_survivors,
    stopped_heartbeats,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import offbeat
from offbeat.elastic import commits, generation
from offbeat.liveness.failure import PeerLost
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.handle import Handle
from offbeat.transport.world import World
from problems import (
    START,
    Lookup,
    Quadratic,
    flat,
    gradient,
    lookup_gradient,
    lookup_loss,
    loss,
)
from ranks import Spawned
from reference.adasum import combine_layers
from reference.participants import Array

__all__ = ["quick", "stopped_heartbeats"]  # fixtures

STEPS, VICTIM = 8, 1
RECIPES = ("ddp(bucket_mb=0.00004)", "local_sgd(every=2)", "diloco(every=2)")
Members = Callable[[int], Collection[int]]  # of the exchange of a step


class Lost(BaseException):
    """Ends the victim's thread.

    Its frames, with the buffers of messages, live until the test ends: without them Gloo's thread
    would poll the victim's sockets in a busy loop.
    """

    def __init__(self) -> None:
        frames_of_victims.append(self)


def expected(
    text: str,
    size: int,
    members: Members,
    accumulated: int = 1,
    weights: Sequence[int] = (1,) * 4,
    growth: float = 1.0,
) -> Array:
    """Train in one process; return the parameters of the ranks that take part to the end."""
    models = [Quadratic() for _ in range(size)]
    optimizers = [adam(model) for model in models]
    schedules = [ExponentialLR(optimizer, growth) for optimizer in optimizers]
    anchor = Quadratic()
    outer = SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        for rank, model in enumerate(models):
            for part in range(accumulated):
                loss(model, rank, accumulated * step + part).backward()
        joined = [models[rank] for rank in members(step)]
        counts = [weights[rank] for rank in members(step)]
        if text.startswith("ddp"):
            mean_of(joined, lambda parameter: parameter.grad, counts)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        if not text.startswith("ddp") and step % 2 == 1:
            before = [p.detach().clone() for p in anchor.parameters()]
            mean_of(joined, lambda parameter: parameter.data, counts)
            if text.startswith("diloco"):
                for a, old, x in zip(
                    anchor.parameters(), before, joined[0].parameters(), strict=True
                ):
                    a.grad = old - x.detach()
                outer.step()
                for model in joined:
                    model.load_state_dict(anchor.state_dict())
    last = [models[rank] for rank in members(STEPS)]
    mean_of(last, lambda parameter: parameter.data)
    return flat(snapshot(last[0]))


def mean_of(
    models: Sequence[nn.Module],
    of: Callable[[nn.Parameter], Tensor | None],
    counts: Sequence[int] = (),
) -> None:
    for row in zip(*(model.parameters() for model in models), strict=True):
        if row[0].requires_grad:
            tensors = [tensor for p in row if (tensor := of(p)) is not None]
            shares = torch.tensor(counts or [1] * len(tensors), dtype=torch.float64)
            mean = torch.einsum("r,r...->...", shares / shares.sum(), torch.stack(tensors))
            for tensor in tensors:
                tensor.copy_(mean)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.05)


def train(
    world: World,
    text: str,
    begins: Callable[[int, int], None],
    accumulated: int = 1,
    weights: Sequence[int] = (),
) -> tuple[Array, dict[str, Any]] | None:
    """Train on one rank; ``begins(rank, step)`` may arm a fault."""
    model = Quadratic()
    replica = offbeat.replicate(
        model, offbeat.algorithm(text), mesh=world, elastic=True, weighted=bool(weights)
    )
    optimizer = adam(model)
    if weights:
        replica.set_weight(weights[world.rank])
    try:
        for step in range(STEPS):
            begins(world.rank, step)
            for part in range(accumulated):
                replica.set_requires_sync(part == accumulated - 1)
                loss(model, world.rank, accumulated * step + part).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=accumulated == 1)
            replica.step()
        replica.finish()
    except Lost:
        perish(replica._connection.links)
        return None
    stats = replica.stats()
    replica.detach()
    return flat(snapshot(model)), stats


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By thread, after how many more waits for a message it dies."""
    left: dict[int, int] = {}
    wait = Handle.wait

    def counted(handle: Handle) -> None:
        me = threading.get_ident()
        if me in left:
            left[me] -= 1
            if left[me] < 0:
                raise Lost
        wait(handle)

    monkeypatch.setattr(Handle, "wait", counted)
    return left


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.parametrize("after", range(5))
@pytest.mark.fault(
    "a rank is lost at any moment of a step",
    "the others train on; no batch is lost",
)
def test_a_loss_at_any_message(text: str, after: int, waits: dict[int, int]) -> None:
    def begins(rank: int, step: int) -> None:
        if (rank, step) == (VICTIM, 3):
            waits[threading.get_ident()] = after

    size, others = 4, [0, 2, 3]
    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        results = [r for r in ThreadWorld(size).run(lambda w: train(w, text, begins)) if r]
    assert len(results) == 3
    until = [
        expected(text, size, lambda step, n=n: others if step >= n else range(size))
        for n in range(3, STEPS + 1)
    ]
    distances = [np.abs(results[0][0] - each).max() for each in until]
    assert min(distances) < 1e-12, "the victim takes part until some exchange, then never"
    until_step = 3 + int(np.argmin(distances))
    used = until_step if text.startswith("ddp") else until_step - until_step % 2
    for end, stats in results:
        assert [(loss["rank"], loss["used"]) for loss in stats["lost"]] == [(VICTIM, used)]
        assert np.array_equal(end, results[0][0])
        assert (stats["size"], stats["step"]) == (3, STEPS)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", RECIPES)
def test_means_are_over_the_weights_of_the_others(text: str, waits: dict[int, int]) -> None:
    weights = (4, 7, 2, 1)

    def begins(rank: int, step: int) -> None:
        if (rank, step) == (VICTIM, 3):
            waits[threading.get_ident()] = 1

    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        run = ThreadWorld(4).run(lambda w: train(w, text, begins, weights=weights))
    until = [
        expected(text, 4, lambda step, n=n: [0, 2, 3] if step >= n else range(4), weights=weights)
        for n in range(3, STEPS)
    ]
    for end, _ in (result for result in run if result):
        assert min(np.abs(end - each).max() for each in until) < 1e-12


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.fault(
    "a rank is lost when an exchange has ended on some",
    "all others have its result",
)
def test_what_one_has_committed_all_commit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first steps all wait for all to have it."""
    gather, armed = commits.gather_numbers, set[int]()

    def torn(numbers: Sequence[float], group: Any) -> Any:
        found = gather(numbers, group)
        if not numbers and threading.get_ident() in armed:
            armed.discard(threading.get_ident())
            if group.ranks[group.rank] == VICTIM:
                raise Lost
            raise PeerLost("the connection of this rank broke before it heard of the others")
        return found

    def begins(rank: int, step: int) -> None:
        if rank in (VICTIM, 2) and step == 1:
            armed.add(threading.get_ident())

    monkeypatch.setattr(commits, "gather_numbers", torn)
    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        results = [r for r in ThreadWorld(4).run(lambda w: train(w, text, begins)) if r]
    want = expected(text, 4, lambda step: [0, 2, 3] if step > 1 else range(4))
    for end, stats in results:
        np.testing.assert_allclose(end, want, rtol=0, atol=1e-12)
        assert (stats["size"], stats["step"]) == (3, STEPS)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("where", ["gather_bytes", "gather_numbers"])
@pytest.mark.fault(
    "a rank is lost when gather() has ended on some",
    "all others have its result",
)
def test_what_one_has_gathered_all_have(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gather is of values, in the second one all hear that all have them."""
    room = {"gather_bytes": generation, "gather_numbers": commits}[where]
    gather, armed = getattr(room, where), set[int]()

    def torn(mine: Any, group: Any) -> Any:
        found = gather(mine, group)
        if threading.get_ident() in armed:
            armed.discard(threading.get_ident())
            if group.ranks[group.rank] == VICTIM:
                raise Lost
            raise PeerLost("the connection of this rank broke before it heard of the others")
        return found

    def work(world: World) -> tuple[list[list[str]], Array] | None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, elastic=True)
        optimizer, heard = adam(model), []
        try:
            for step in range(STEPS):
                if world.rank in (VICTIM, 2) and step == 3:
                    armed.add(threading.get_ident())
                heard.append(replica.gather(f"{world.rank} in {step}"))
                loss(model, world.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
        except Lost:
            perish(replica._connection.links)
            return None
        replica.detach()
        return heard, flat(snapshot(model))

    monkeypatch.setattr(room, where, torn)
    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        results = [found for found in ThreadWorld(4).run(work) if found]
    want = expected("ddp", 4, lambda step: [0, 2, 3] if step >= 3 else range(4))
    for heard, end in results:
        np.testing.assert_allclose(end, want, rtol=0, atol=1e-12)
        for step, texts in enumerate(heard):
            all_have = step < 3 or (step == 3 and where == "gather_numbers")
            ranks = (0, 1, 2, 3) if all_have else (0, 2, 3)
            assert texts == [f"{rank} in {step}" for rank in ranks]


@pytest.mark.usefixtures("quick")
def test_gradients_that_accumulate_in_place_survive_a_loss(waits: dict[int, int]) -> None:
    """With set_to_none=False ``.grad`` is the memory of the messages of the step before."""
    text = RECIPES[0]

    def begins(rank: int, step: int) -> None:
        if (rank, step) == (VICTIM, 3):
            waits[threading.get_ident()] = 1  # some messages have arrived everywhere

    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        results = [r for r in ThreadWorld(3).run(lambda w: train(w, text, begins, 2)) if r]
    want = expected(text, 3, lambda step: [0, 2] if step >= 3 else range(3), 2)
    for end, _ in results:
        np.testing.assert_allclose(end, want, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", ["ddp", "adasum"])
@pytest.mark.parametrize("after", range(6))
def test_rows_are_exchanged_again_after_a_loss(
    after: int, text: str, waits: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.methods.adasum.touched_rows.NAMING", math.inf)  # a tiny table

    def work(world: World) -> Array | None:
        model = Lookup()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, elastic=True)
        optimizer = SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            if (world.rank, step) == (VICTIM, 3):
                waits[threading.get_ident()] = after
            try:
                lookup_loss(model, world.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
            except Lost:
                return perish(replica._connection.links)
        replica.detach()
        return flat(snapshot(model))

    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        ends = [end for end in ThreadWorld(3).run(work) if end is not None]
    until = [
        lookup_ends(COMBINED[text], lambda step, n=n: [0, 2] if step >= n else range(3))
        for n in range(3, STEPS)
    ]
    assert min(np.abs(ends[0] - each).max() for each in until) < 1e-12
    assert np.array_equal(*ends)


COMBINED: dict[str, Callable[[Array], Array]] = {
    "ddp": lambda gradients: gradients.mean(axis=0),
    "adasum": lambda gradients: combine_layers(gradients, (6, 3)),
}


def lookup_ends(combined: Callable[[Array], Array], members: Members) -> Array:
    z = START
    for step in range(STEPS):
        z = z - 0.05 * combined(np.stack([lookup_gradient(r, z, step) for r in members(step)]))
    return z


LR, LOST_AT = 0.05, 3


def lose_one(
    size: int, victim: int, after: int, waits: dict[int, int]
) -> dict[int, tuple[list[Array], list[Array]]]:
    """Return the models and residuals of each survivor under lags, those of the start first."""

    def work(world: World) -> Any:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=LR)
        given: Any = {"mesh": world, "optimizer": optimizer, "elastic": True}
        replica = offbeat.replicate(model, offbeat.lags(density=0.34), **given)
        places, residuals = [flat(snapshot(model))], [np.zeros(9)]
        for step in range(STEPS):
            if (world.rank, step) == (victim, LOST_AT):
                waits[threading.get_ident()] = after
            try:
                loss(model, world.rank, step).backward()
                optimizer.step()
                replica.step()
            except Lost:
                perish(replica._connection.links)
                return None
            optimizer.zero_grad()
            (entry,) = replica.state_dict().values()
            places.append(flat(snapshot(model)))
            if "residual" in entry["gradients"]:  # not of a rank without mates
                residuals.append(flat(entry["gradients"]["residual"]))
        replica.detach()
        return places, residuals

    with pytest.warns(RuntimeWarning, match=rf"ranks \[{victim}\] are lost"):
        found = dict(enumerate(ThreadWorld(size).run(work)))
    assert found.pop(victim) is None
    return found


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("after", range(4))
def test_the_residuals_of_the_last_rank_enter_its_next_gradient(
    after: int, waits: dict[int, int]
) -> None:
    """From a step on alone, v' = v - lr sum g - R."""
    ((places, residuals),) = lose_one(2, 0, after, waits).values()
    start = len(residuals) - 1
    alone = LR * sum(gradient(1, x, 0) for x in places[start:-1])
    np.testing.assert_allclose(places[-1], places[start] - alone - residuals[-1], atol=1e-12)
    assert np.abs(residuals[-1]).max() > 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("after", range(4))
def test_residuals_survive_a_loss(after: int, waits: dict[int, int]) -> None:
    r"""Nothing that a survivor has not sent is lost, and nothing is sent twice.

    With P survivors from a step on, their residuals R and gradients g since then,
    v' = v - (lr sum g + sum R - sum R') / P.
    """
    found = lose_one(4, VICTIM, after, waits)
    places = found[0][0]
    assert all(np.array_equal(run[0][-1], places[-1]) for run in found.values())
    misses = []  # where it is lost depends on the number of messages of a step
    for start in range(LOST_AT, STEPS):
        gradients = sum(gradient(r, x, 0) for r in found for x in places[start:-1])
        kept = sum(run[1][-1] - run[1][start] for run in found.values())
        end = places[start] - (LR * gradients - kept) / 3
        misses.append(np.abs(places[-1] - end).max())
    assert min(misses) < 1e-12, misses


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", ["ddp()", "local_sgd(every=2)"])
def test_the_last_one_goes_on_alone(text: str) -> None:
    def begins(rank: int, step: int) -> None:
        if rank > 0 and step == 2 + rank:
            raise Lost

    with pytest.warns(RuntimeWarning, match=r"are lost"):
        results = [r for r in ThreadWorld(3).run(lambda w: train(w, text, begins)) if r]
    ((_, stats),) = results
    assert (stats["size"], stats["step"]) == (1, STEPS)
    assert [loss["rank"] for loss in stats["lost"]] == [1, 2]


@pytest.mark.parametrize("text", ["torch_ddp", "lags(density='adaptive')", "lags(measure=True)"])
def test_what_cannot_be_made_again_is_refused(text: str) -> None:
    def work(world: World) -> None:
        with pytest.raises(ValueError, match="cannot be made again without a lost rank"):
            offbeat.replicate(Quadratic(), offbeat.algorithm(text), mesh=world, elastic=True)

    ThreadWorld(2).run(work)


def _train_to_the_end(rank: int, results: Any, text: str, victim: int, at: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = Adam(model.parameters(), lr=0.01)
    replica = offbeat.replicate(model, offbeat.algorithm(text), elastic=True)
    torch.manual_seed(rank)
    losses = []
    for step in range(200):
        x = torch.randn(32, 5)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        losses.append(loss.item())
        loss.backward()
        if (rank, step) == (victim, at):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    replica.finish()
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    results.put((rank, {"losses": losses, "state": state, "stats": replica.stats()}))
    replica.detach()


@pytest.mark.processes
@pytest.mark.parametrize("text", ["ddp()", "local_sgd(every=4)", "diloco(every=4)"])
@pytest.mark.fault("a rank is killed", "the others train on")
def test_a_killed_process_is_survived(text: str, draws: random.Random) -> None:
    victim, at = draws.randrange(4), draws.randrange(40, 80)
    said = results_of_survivors(_train_to_the_end, text, victim, at)
    first = next(iter(said.values()))
    for result in said.values():
        assert result["state"] == first["state"]
        assert [lost["rank"] for lost in result["stats"]["lost"]] == [victim]
        assert (result["stats"]["size"], result["stats"]["step"]) == (3, 200)
        assert np.mean(result["losses"][-20:]) < 0.5 * np.mean(result["losses"][:20])


def _leave_by_signal(rank: int, results: Any, text: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = Adam(model.parameters(), lr=0.01)
    algorithm = offbeat.algorithm(text)
    replica = offbeat.replicate(model, algorithm, optimizer=optimizer, elastic=True)
    offbeat.leave_on_signal(replica)
    longest = 0.0
    for step in range(150):
        before = time.monotonic()
        time.sleep(0.02)
        model(torch.randn(8, 5)).square().mean().backward()
        if (rank, step) == (VICTIM, 20):
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        longest = max(longest, time.monotonic() - before) if step else 0.0
        if replica.has_left:
            results.put((rank, {"left": replica.steps}))
            return
    replica.finish()
    state = [p.tolist() for p in model.parameters()]
    lost = replica.stats()["lost"]
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
    child.start()
    time.sleep(0.5)  # Python forgets signals that come as it forks
    child.terminate()
    child.join()
    ended = {"longest": longest, "lost": lost, "child": child.exitcode}
    results.put((rank, {"state": state, **ended}))
    replica.detach()
    results.close()
    results.join_thread()
    os.kill(os.getpid(), signal.SIGTERM)  # ends the process, as without offbeat
    time.sleep(20)


@pytest.mark.processes
@pytest.mark.parametrize("text", ["ddp()", "diloco(every=4)"])
@pytest.mark.fault(
    "SIGTERM in the middle of a step of an elastic run (leave_on_signal)",
    "it leaves after an exchange; the others do not wait",
    group="Leaving",
)
def test_a_preempted_process_leaves(text: str) -> None:
    world = Spawned(_leave_by_signal, 4, text)
    said = dict(world.join(timeout=100))
    ends = [0 if rank == VICTIM else -signal.SIGTERM for rank in range(4)]
    assert [process.exitcode for process in world.processes] == ends
    left = said.pop(VICTIM)["left"]
    assert left > 20
    first = next(iter(said.values()))
    for result in said.values():
        assert result["state"] == first["state"]
        (lost,) = result["lost"]
        assert lost == {"rank": VICTIM, "step": left - 1, "used": left, "left": 1}
        assert result["longest"] < 1.5, "no wait for a silence"
        assert result["child"] == -signal.SIGTERM, "a child that is forked ends as before"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("torn_at", ["call", "agreement"])
@pytest.mark.parametrize(
    ("verb", "is_weighted"),
    [
        ("finish", False),
        ("finish", True),
        ("consensus", False),
        ("consensus_distance", False),
        ("load_state_dict", False),
    ],
)
@pytest.mark.fault(
    "a rank is lost when finish(), consensus() or load_state_dict() has ended on some only",
    "the others have all made the call, or all make it again",
)
def test_a_call_ends_on_all_or_on_none(
    verb: str, is_weighted: bool, torn_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise those for which it has ended are in the next one, and the others never end it."""
    armed = set[int]()

    def torn(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = function(*args)
            if threading.get_ident() in armed:
                armed.discard(threading.get_ident())
                raise Lost if threading.current_thread() in dying else PeerLost("it broke")
            return found

        return call

    dying = set[threading.Thread]()
    together = generation.Generation.together

    def tears(self: Any, name: str | None, call: Any, *more: Any) -> Any:
        return together(self, name, torn(call) if name == verb else call, *more)

    def work(world: World) -> tuple[Array, Array, Array, int] | None:
        model = Quadratic()
        algorithm = offbeat.algorithm("local_sgd(every=4)")
        replica = offbeat.replicate(
            model, algorithm, mesh=world, elastic=True, weighted=is_weighted
        )
        saved = replica.state_dict()
        if world.rank == VICTIM:
            dying.add(threading.current_thread())
        try:
            for _ in range(2):
                with torch.no_grad():
                    model.vector.add_(float(world.rank))
                replica.step()
            replica.gather("")
            if world.rank in (VICTIM, 2):
                armed.add(threading.get_ident())
            own = flat(snapshot(model))
            if verb == "consensus":
                with replica.consensus():
                    pass
                np.testing.assert_array_equal(flat(snapshot(model)), own)
            else:
                getattr(replica, verb)(*([saved] if verb == "load_state_dict" else []))
        except Lost:
            perish(replica._connection.links)
            return None
        assert len(replica.lost) <= 1
        after = flat(snapshot(model))
        for _ in range(6):
            replica.step()
        replica.finish()
        result = own, after, flat(snapshot(model)), len(replica.lost)
        replica.detach()
        return result

    if torn_at == "call":
        monkeypatch.setattr(generation.Generation, "together", tears)
    else:
        monkeypatch.setattr(commits, "gather_numbers", torn(commits.gather_numbers))
    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        results = [found for found in ThreadWorld(4).run(work) if found]
    assert len(results) == 3
    own, given = [own for own, *_ in results], np.array([0.0] * 6 + [1.0] * 3)
    # The average of those that make the call again; that of all where each has made it.
    mean = np.mean(own if torn_at == "call" else [*own, own[0] + 2 * VICTIM * given], axis=0)
    for _, after, end, losses in results:
        np.testing.assert_array_equal(end, results[0][2])
        if verb == "finish":
            np.testing.assert_allclose(after, mean, rtol=0, atol=1e-12)
        assert losses == 1
