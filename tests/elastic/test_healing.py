"""A rank that misses a result which others hold gets the gradients, or what they made of them."""

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from test_survivors import perish, quick, stopped_heartbeats
from test_transactions import STEPS, VICTIM, Lost, adam, expected
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

import offbeat
from offbeat.attach.connection import Connection
from offbeat.elastic import commits, survivors
from offbeat.elastic.agreement import Agreement
from offbeat.liveness.failure import PeerLost
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.handle import Handle
from offbeat.transport.world import World
from problems import Quadratic, flat, gradient, loss

__all__ = ["quick", "stopped_heartbeats"]  # fixtures

LAST = 4  # the last step of the victim
GROWTH = 1.1  # of the learning rate, in each step
OTHERS = (0, 2, 3)
WINDOWS = "local_sgd(every=2)", "diloco(every=2)", "adasum(every=2)"
BARE = offbeat.ddp(broadcast_buffers=False)  # no message follows gradients


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the victim end after some messages of its last step, and others miss the last one."""
    left: dict[int, int] = {}
    wait, has_ended, victims = Handle.wait, threading.Event(), set[int]()

    def counted(handle: Handle) -> None:
        me = threading.get_ident()
        is_last = left.get(me) == 1
        if is_last and me not in victims:
            del left[me]
            assert has_ended.wait(20)
            raise PeerLost("the connection of this rank broke before it had the message")
        wait(handle)
        if is_last:
            has_ended.set()
            raise Lost
        if me in left:
            left[me] -= 1

    def begins(
        rank: int, step: int, behind: Collection[int], messages: int = 1, last: int = LAST
    ) -> None:
        if step == last and rank in (VICTIM, *behind):
            left[threading.get_ident()] = messages
            victims.update({threading.get_ident()} if rank == VICTIM else ())

    monkeypatch.setattr(Handle, "wait", counted)
    return begins


def run(work: Callable[[World], Any], size: int = 4) -> dict[int, Any]:
    """What each survivor returns."""
    with pytest.warns(RuntimeWarning, match=r"ranks \[1(, 2)?\] are lost"):
        found = dict(enumerate(ThreadWorld(size).run(work)))
    assert found.pop(VICTIM) is None
    return found


def train(
    world: World,
    torn: Callable[..., None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    algorithm: offbeat.Algorithm = BARE,
    behind: Collection[int] = (2,),
    last: int = LAST,
    between: Callable[[offbeat.Replica, int], object] = lambda *_: None,
    after: Callable[[offbeat.Replica, int], object] = lambda *_: None,
) -> Any:
    """Train one rank; its end, what it was told, or None of the victim.

    The end is that before ``finish()``, whose average would hide differences.
    """
    given: dict[str, Any] = {"optimizer": optimizer, "elastic": True}
    replica = offbeat.replicate(model, algorithm, mesh=world, **given)
    try:
        for step in range(STEPS):
            torn(world.rank, step, behind, last=last)
            loss(model, world.rank, step).backward()
            between(replica, step)
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            after(replica, step)
    except Lost:
        return perish(replica._connection.links)
    except PeerLost as error:
        return str(error)
    end = flat(snapshot(model))
    replica.finish()
    replica.detach()
    return end


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("size", "behind"), [(4, (2,)), (4, (0, 3)), (6, (4,))])
@pytest.mark.fault(
    "a rank is lost when some have made a step with its last result and some miss it",
    "those behind get parameters and optimizers of one that is not; all stay equal",
)
def test_those_behind_get_what_others_made(
    size: int, behind: Collection[int], torn: Callable[..., None]
) -> None:
    """Of six ranks, the last case has two that are no neighbours in a ring or a tree."""

    def work(world: World) -> Any:
        model = Quadratic()
        optimizer = adam(model)
        given = {"optimizer": optimizer, "elastic": True}
        replica = offbeat.replicate(model, BARE, mesh=world, **given)
        schedule = ExponentialLR(optimizer, GROWTH)
        try:
            for step in range(STEPS):
                torn(world.rank, step, behind)
                loss(model, world.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
                schedule.step()  # it has no part in what is handed over
        except Lost:
            return perish(replica._connection.links)
        stats = replica.stats()
        replica.detach()
        return flat(snapshot(model)), stats

    found = run(work, size)
    want = expected(
        "ddp", size, lambda step: [*found] if step > LAST else range(size), 1, (1,) * size, GROWTH
    )
    for end, stats in found.values():
        np.testing.assert_allclose(end, want, rtol=0, atol=1e-12)
        assert np.array_equal(end, found[0][0])
        assert [(each["rank"], each["used"]) for each in stats["lost"]] == [(VICTIM, LAST + 1)]


def require_equal(text: str, found: dict[int, Any], size: int, last: int) -> None:
    """Survivors are equal, and where one process can tell, as all ranks until ``last`` make them.

    Adasum's sums are not those of one process.
    """
    first, *others = found.values()
    assert all(np.array_equal(end, first) for end in others)
    if text.startswith("adasum"):
        return
    want = expected(
        text, size, lambda step: [*found] if step > last else range(size), 1, (1,) * size
    )
    np.testing.assert_allclose(first, want, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("text", "behind", "last"),  # both steps end a window
    [*((text, (2,), 5) for text in WINDOWS), (WINDOWS[0], (0, 3), STEPS - 1)],
)
@pytest.mark.fault(
    "a rank is lost when some have the result of a window and train on, and some miss it",
    "those behind get it from one that keeps it; all stay equal",
)
def test_those_behind_get_the_result_of_a_window(
    text: str, behind: Collection[int], last: int, torn: Callable[..., None]
) -> None:
    """Ranks that hold it are a step ahead when they find the loss, or in another call."""
    replicas: dict[int, offbeat.Replica] = {}

    def work(world: World) -> Any:
        def note(replica: offbeat.Replica, step: int) -> None:
            replicas[world.rank] = replica

        model, algorithm = Quadratic(), offbeat.algorithm(text)
        given: dict[str, Any] = {"algorithm": algorithm, "behind": behind, "last": last}
        return train(world, torn, model, adam(model), after=note, **given)

    found = run(work)
    require_equal(text, found, 4, last)
    for rank in found:
        lost = [(each["rank"], each["used"]) for each in replicas[rank].lost]
        assert lost == [(VICTIM, last + 1)]


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:.*ranks .0. are lost:RuntimeWarning")
@pytest.mark.parametrize("text", WINDOWS)
@pytest.mark.fault(
    "the rank that hands over the result of a window is lost meanwhile",
    "those behind get it from another one",
)
def test_those_behind_get_it_from_another_if_the_donor_is_lost(
    text: str, torn: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other donor has taken over the links without the first lost rank already."""
    heal, connect, opened = survivors.heal, Connection.open, dict[int, Any]()

    def noted(connection: Connection, *pair: Any) -> Connection:
        opened[threading.get_ident()] = connection.links
        return connect(connection, *pair)

    def dies(made: Any, control: Any, agreed: Agreement) -> Any:
        if agreed.donor == 0 == control.ranks[control.rank]:
            perish(opened[threading.get_ident()])
            raise KeyboardInterrupt
        return heal(made, control, agreed)

    monkeypatch.setattr(survivors, "heal", dies)
    monkeypatch.setattr(Connection, "open", noted)

    def work(world: World) -> Any:
        model, algorithm = Quadratic(), offbeat.algorithm(text)
        try:
            return train(world, torn, model, adam(model), algorithm=algorithm, last=5)
        except KeyboardInterrupt:
            return None

    found = run(work, 5)
    assert found.pop(0) is None
    require_equal(text, found, 5, 5)


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:ranks .1. are lost:RuntimeWarning")
@pytest.mark.parametrize("text", ["diloco(every=2)", "adasum(every=2)"])
def test_a_result_that_is_discarded_makes_nobody_fall_behind(
    text: str, torn: Callable[..., None]
) -> None:
    last = 5

    def work(world: World) -> Any:
        model = Quadratic()
        given = {"optimizer": adam(model), "elastic": True}
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, **given)
        said = ""
        try:
            for step in range(STEPS):
                if (world.rank, step) == (VICTIM, last):
                    with torch.no_grad():
                        model.vector[0] = torch.nan
                torn(world.rank, step, (2,), 1, last)
                try:
                    replica.step()
                except ValueError as error:
                    said = str(error)
                    replica.step()
        except Lost:
            return perish(replica._connection.links)
        stats = replica.stats()
        replica.detach()
        return said, stats["step"], [each["used"] for each in stats["lost"]]

    found = run(work)
    assert {steps for _, steps, _ in found.values()} == {STEPS}
    assert {tuple(used) for *_, used in found.values()} == {(4,)}


@pytest.mark.parametrize("text", ["ddp(broadcast_buffers=False)", "local_sgd(every=1)", "adasum"])
def test_ranks_wait_for_all_where_no_wait_tells_what_has_arrived(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL: a wait returns once the message is ordered before what follows on a stream."""
    gather, waits = commits.gather_numbers, Counter[bool]()

    def counted(numbers: Any, group: Any) -> Any:
        waits[on_stream] += 1
        return gather(numbers, group)

    def work(world: World) -> None:
        model = Quadratic()
        given = {"optimizer": adam(model), "elastic": True}
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, **given)
        for step in range(STEPS):
            loss(model, world.rank, step).backward()
            replica.step()
        replica.detach()

    monkeypatch.setattr(commits, "gather_numbers", counted)
    for on_stream in (True, False):
        monkeypatch.setattr(commits, "has_streams", lambda device, found=on_stream: found)
        ThreadWorld(2).run(work)
    assert waits == {True: 2 * STEPS, False: 2 * 2}  # of two ranks; without, in two steps


class Normalized(nn.Module):
    """A model with buffers, which are exchanged after its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.out = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            self.out.weight.fill_(0.5)
            self.out.bias.zero_()

    def forward(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        result: torch.Tensor = (self.out(self.norm(batch)) - batch.sum(1, keepdim=True)).square()
        return result.mean()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("messages", "behind"), [(1, (0, 3)), (2, (2,))])
@pytest.mark.fault(
    "a rank is lost when some miss the gradients that others hold, or the buffers",
    "those behind get them",
)
def test_those_behind_get_gradients_and_buffers(
    messages: int, behind: Collection[int], torn: Callable[..., None]
) -> None:
    """The second message of a step has the buffers."""

    def work(world: World) -> Any:
        model = Normalized()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        given = {"optimizer": optimizer, "elastic": True}
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, **given)
        try:
            for step in range(STEPS):
                torn(world.rank, step, behind, messages)
                model(world.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
        except Lost:
            return perish(replica._connection.links)
        replica.detach()
        return {name: t.clone() for name, t in model.state_dict().items()}

    found = run(work)
    for name, want in normalized().items():
        for end in found.values():
            assert torch.equal(end[name], found[0][name]), name
            if name.startswith(("out", "norm.weight", "norm.bias")):
                torch.testing.assert_close(end[name], want, rtol=0, atol=1e-12)


def normalized() -> dict[str, torch.Tensor]:
    """Train in one process, on the batches of all that take part."""
    model = Normalized()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        ranks = OTHERS if step > LAST else range(4)
        for rank in ranks:
            (model(rank, step) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


class Adaptive(SGD):
    """Keeps the size of a step among its settings, as optimizers do that need no learning rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        grads = [p.grad for p in group["params"] if p.grad is not None]
        group["seen"] = group.get("seen", 0.0) + float(sum(g.square().sum() for g in grads))
        group["lr"] = 0.05
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1 / (1 + group["seen"]) ** 0.5)


@pytest.mark.usefixtures("quick")
def test_settings_in_which_optimizers_keep_a_state_are_handed_over(
    torn: Callable[..., None],
) -> None:
    def work(world: World) -> Any:
        model = Quadratic()
        optimizer = Adaptive([p for p in model.parameters() if p.requires_grad], lr=0.05)
        end = train(world, torn, model, optimizer)
        return None if end is None else (end, optimizer.param_groups[0]["seen"])

    found = run(work)
    assert len({seen for _, seen in found.values()}) == 1
    assert all(np.array_equal(end, found[0][0]) for end, _ in found.values())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("messages", [1, 2, 3])
def test_residuals_of_those_behind_are_those_of_what_they_sent(
    messages: int, torn: Callable[..., None]
) -> None:
    """As in ``test_residuals_survive_a_loss``: nothing is lost, and nothing is sent twice.

    The third message of a step has the buffers.
    """
    lr = 0.05

    def work(world: World) -> Any:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=lr)
        given = {"optimizer": optimizer, "elastic": True}
        recipe = offbeat.lags(density=0.12, broadcast_buffers=True)
        replica = offbeat.replicate(model, recipe, mesh=world, **given)
        assert len(replica.gradients.messages) == 2
        places, residuals = [flat(snapshot(model))], [np.zeros(9)]
        for step in range(STEPS):
            torn(world.rank, step, (2,), messages)
            try:
                loss(model, world.rank, step).backward()
                optimizer.step()
                replica.step()
            except Lost:
                return perish(replica._connection.links)
            optimizer.zero_grad()
            (entry,) = replica.state_dict().values()
            places.append(flat(snapshot(model)))
            residuals.append(flat(entry["gradients"]["residual"]))
        replica.detach()
        return places, residuals

    found = run(work)
    places = found[0][0]
    for step in range(LAST + 1, STEPS + 1):
        assert all(np.array_equal(run[0][step], places[step]) for run in found.values()), step
    misses = []  # whether the second message of the victim arrives is a matter of chance
    for start in (LAST, LAST + 1):
        gradients = sum(gradient(r, x, 0) for r in found for x in places[start:-1])
        kept = sum(run[1][-1] - run[1][start] for run in found.values())
        misses.append(np.abs(places[-1] - places[start] + (lr * gradients - kept) / 3).max())
    assert min(misses) < 1e-12, misses


@pytest.mark.usefixtures("quick")
def test_a_result_that_is_in_the_hands_of_the_script_is_not_handed_over(
    torn: Callable[..., None],
) -> None:
    """The script may have clipped it; in the next step with such a call, all wait for all."""

    def between(replica: offbeat.Replica, step: int) -> None:
        if step >= LAST:
            replica.gather("between")

    def work(world: World) -> Any:
        model = Quadratic()
        return train(world, torn, model, SGD(model.parameters(), lr=0.05), between=between)

    found = run(work)
    assert "rank 2 was given up by the others" in found[2]
    assert np.array_equal(found[0], found[3])


@pytest.mark.usefixtures("quick")
def test_weights_that_the_script_has_swapped_in_are_not_handed_over(
    torn: Callable[..., None],
) -> None:
    """Others may find a loss in the middle of an evaluation."""

    def evaluate(replica: offbeat.Replica, step: int) -> None:
        if step < LAST:
            return
        parameters = [*replica.model.parameters()]
        held = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
            replica.gather("evaluated")
            for parameter, before in zip(parameters, held, strict=True):
                parameter.copy_(before)

    def work(world: World) -> Any:
        model = Quadratic()
        return train(world, torn, model, SGD(model.parameters(), lr=0.05), after=evaluate)

    found = run(work)
    assert "rank 2 was given up by the others" in found[2]
    assert found[0].any()
    assert np.array_equal(found[0], found[3])


def test_runs_that_wait_and_runs_that_do_not_are_not_mixed() -> None:
    def work(world: World) -> None:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu") if world.rank else None
        given: dict[str, Any] = {"optimizer": optimizer, "scaler": scaler, "elastic": True}
        with pytest.raises(ValueError, match="scaler, weights or parameters of no optimizer"):
            offbeat.replicate(model, offbeat.ddp(), mesh=world, **given)

    ThreadWorld(2).run(work)
