"""Parameters that are not finite on one rank: an error on all, or a step that it skips."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

import offbeat
from offbeat.exchange.guard import Guard
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import Quadratic, loss
from reference.participants import Nodes

LONE: Nodes = ((0,), (1,), (2,), (3,))
PAIRS: Nodes = ((0, 1), (2, 3))
REPEATABLE = {
    "local_sgd(every=2{})": LONE,
    "local_sgd(every=2, within='local'{})": PAIRS,
    "noloco(every=2{})": LONE,
    "noloco(every=2, within='local'{})": PAIRS,
    "sgp(topology='exponential'{})": LONE,
    "sgp(overlap=1{})": LONE,
    "sgp(overlap=3, wire='bf16'{})": LONE,
    "sgp('ring', biased=True{})": LONE,
    "sgp(within='local'{})": PAIRS,
    "sgp('ring', within='local'{})": PAIRS,  # in an elastic run: a node is one participant
    "sgp(outer='SGD(lr=1, momentum=0.5)', outer_every=3{})": LONE,
    "d_psgd('ring'{})": LONE,
    "daso(every=2, wait=2{})": PAIRS,
    "daso(every=2, warmup_steps=9{})": PAIRS,
}
METHODS = REPEATABLE | {"ad_psgd(within=None{})": LONE, "ad_psgd(within='local'{})": PAIRS}
SKIP = ", nonfinite='skip'"


def is_elastic(method: str) -> bool:
    return method.startswith("sgp('ring', within='local'")


def train(model: Quadratic, optimizer: Optimizer, replica: offbeat.Replica, steps: int = 1) -> None:
    for _ in range(steps):
        loss(model, replica.world.rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def said(replica: offbeat.Replica, call: Any) -> str:
    """The text of the error that ``call`` ends with."""
    with pytest.raises(ValueError, match="not finite") as error:
        call()
    return str(error.value)


@pytest.mark.usefixtures("fast_heartbeat")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.fault(
    "a parameter is NaN or infinite on one rank",
    "ValueError on all ranks; names the rank and the parameter",
)
def test_one_bad_number_is_the_same_error_on_all_ranks(method: str) -> None:
    bad = torch.inf if "within" in method else torch.nan

    def worker(world: World) -> str:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(
            model, offbeat.algorithm(method.format("")), mesh=world, elastic=is_elastic(method)
        )
        optimizer = SGD(model.parameters(), lr=0.1)

        def go_on() -> None:
            train(model, optimizer, replica, steps=3)
            if world.rank == 2:
                with torch.no_grad():
                    model.vector[1] = bad
            train(model, optimizer, replica, steps=6)
            replica.finish()  # under ad_psgd no step waits

        error = said(replica, go_on)  # a rank that is a step behind hears of it before its own
        finite = all(p.isfinite().all() for p in model.parameters())
        # Where gradients are averaged inside a node, all its ranks have the value.
        assert finite or 2 in world.nodes[world.node]
        return error

    nodes = METHODS[method]
    (error,) = set(ThreadWorld(nodes=nodes).run(worker))
    bad_node = next(node for node in nodes if 2 in node)
    text = "parameter 'vector' is not finite after the optimizer's step"
    named = [f"rank {rank}: {text}" for rank in bad_node]
    if is_elastic(method):  # a node is one participant
        named = [f"node {nodes.index(bad_node)}: {text}"]
    assert error.startswith(tuple(named))


@pytest.mark.usefixtures("fast_heartbeat")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_number_in_the_slice_of_another_rank_of_the_node(rank: int) -> None:
    """Each rank of a node exchanges a slice; the gather would hide what its others lack."""

    def worker(world: World) -> str:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, offbeat.algorithm("sgp(within='local')"), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        parameters = list(model.parameters())

        def go_on() -> None:
            train(model, optimizer, replica, steps=2)
            loss(model, world.rank, 0).backward()
            optimizer.step()
            if world.rank == rank:
                with torch.no_grad():
                    # Rank 0 exchanges the first half of the model, rank 1 the last.
                    parameters[rank - 1].view(-1)[rank - 1] = torch.nan
            replica.step()
            train(model, optimizer, replica, steps=3)

        return said(replica, go_on)

    (error,) = set(ThreadWorld(nodes=PAIRS).run(worker))
    assert error.startswith(f"rank {rank}: parameter ")


@pytest.mark.parametrize("method", REPEATABLE)
@pytest.mark.fault(
    "a parameter is NaN on one rank, with nonfinite='skip'",
    "the rank takes no step",
)
def test_a_skipped_step_is_one_that_the_optimizer_did_not_make(method: str) -> None:
    """Bit for bit, in steps with an exchange and in others."""
    nodes = REPEATABLE[method]

    def worker(world: World, damaged: bool) -> list[Tensor]:
        model = Quadratic(torch.float32)
        algorithm = offbeat.algorithm(method.format(SKIP if damaged else ""))
        replica = offbeat.replicate(model, algorithm, mesh=world, elastic=is_elastic(method))
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(9):
            loss(model, world.rank, 0).backward()
            if step not in (2, 5) or world.rank not in nodes[1]:
                optimizer.step()
            elif damaged:
                with torch.no_grad():
                    model.vector[1] = torch.nan
            optimizer.zero_grad()
            replica.step()
        if not is_elastic(method) or world.local_rank == 0:  # a node is one participant
            measures = replica.stats()["measures"]
            assert measures.get("skipped") == (2 * int(world.rank in nodes[1]) if damaged else None)
        replica.detach()
        return [p.detach().clone() for p in model.parameters()]

    ours, theirs = (
        ThreadWorld(nodes=nodes).run(lambda world, d=damaged: worker(world, d))
        for damaged in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("within", ["None", "'local'"])
def test_a_bad_snapshot_is_never_exchanged(within: str) -> None:
    """Pairs form by the clock, so only this can be said of them."""

    def worker(world: World) -> bool:
        model = Quadratic(torch.float32)
        algorithm = offbeat.algorithm(f"ad_psgd(within={within}{SKIP})")
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(12):
            loss(model, world.rank, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (0, 4, 7) and world.rank == 1:
                with torch.no_grad():
                    model.matrix.fill_(torch.inf)
            replica.step()
        replica.finish()
        replica.detach()
        assert replica.stats()["measures"] == {"skipped": 3 * (world.rank == 1)}
        return all(bool(p.isfinite().all()) for p in model.parameters())

    nodes = LONE if within == "None" else PAIRS
    assert all(ThreadWorld(nodes=nodes).run(worker))


@pytest.mark.usefixtures("fast_heartbeat")
@pytest.mark.parametrize(
    ("method", "resumed"),
    [("sgp(overlap=1{})", True), ("local_sgd(every=4{})", False), ("adasum(every=1{})", True)],
)
@pytest.mark.fault(
    "a rank has to skip two steps in a row",
    "ValueError on all ranks; names the rank and the cause",
)
def test_a_second_skip_in_a_row_is_an_error(method: str, resumed: bool) -> None:
    """The moments of Adam stay NaN; also where a checkpoint lies between the two."""
    algorithm = offbeat.algorithm(method.format(SKIP))

    def worker(world: World) -> str:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = Adam(model.parameters(), lr=0.1)
        train(model, optimizer, replica, steps=2)
        if world.rank == 1:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    optimizer.state[parameter]["exp_avg"][0] = torch.nan
        train(model, optimizer, replica)
        if resumed:
            file = io.BytesIO()
            torch.save(replica.state_dict(), file)
            file.seek(0)
            replica.detach()
            replica = offbeat.replicate(model, algorithm, mesh=world)
            replica.load_state_dict(torch.load(file, weights_only=True))
        return said(replica, lambda: train(model, optimizer, replica, steps=4))

    (error,) = set(ThreadWorld(nodes=LONE).run(worker))
    assert error.startswith("rank 1: parameter 'matrix' is not finite after two steps in a row")
    assert "Adam" in error


def test_one_skip_now_and_then_is_no_error() -> None:
    """Of two ranks in turn, and of one with a step in between; SGD recovers."""

    def worker(world: World, method: str) -> dict[str, float]:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, offbeat.algorithm(method.format(SKIP)), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        for bad in (None, 1, 2, 1, None, 1):
            if bad == world.rank:
                with torch.no_grad():
                    model.vector.fill_(torch.nan)
            train(model, optimizer, replica)
        replica.detach()
        return dict(replica.stats()["measures"])

    for method, counts in (("sgp('ring'{})", [0, 3, 1]), ("adasum(every=1{})", [4, 4, 4])):
        found = ThreadWorld(3).run(lambda world, method=method: worker(world, method))
        assert [measures["skipped"] for measures in found] == counts


@pytest.mark.usefixtures("fast_heartbeat")
@pytest.mark.parametrize("options", ["", SKIP])
def test_an_average_of_what_is_not_finite_is_an_error(options: str) -> None:
    """Between two exchanges nothing was checked, or skipped, yet."""

    def worker(world: World) -> str:
        model = Quadratic(torch.float32)
        algorithm = offbeat.algorithm(f"local_sgd(every=8{options})")
        replica = offbeat.replicate(model, algorithm, mesh=world)
        train(model, SGD(model.parameters(), lr=0.1), replica)
        if world.rank == 0:
            with torch.no_grad():
                model.vector.fill_(torch.nan)
        return said(replica, replica.finish)

    (error,) = set(ThreadWorld(2).run(worker))
    assert error.startswith("rank 0: parameter 'vector' is not finite")


def test_large_values_are_finite() -> None:
    """The norm of these overflows."""
    parameters = {"large": torch.full((3,), 1e30)}
    guard = Guard(SimpleNamespace(parameters=parameters), None, "rank 0")  # type: ignore[arg-type]
    guard.check()
    guard.require()


def test_skip_is_refused_where_ranks_would_have_to_agree() -> None:
    world = SimpleNamespace(rank=0)
    sharded = SimpleNamespace(parameters={}, shards=object(), world=world)
    with pytest.raises(ValueError, match="nonfinite='skip' with a sharded model"):
        Guard.of(sharded, "skip")  # type: ignore[arg-type]
    assert Guard.of(sharded, "raise").kept is None  # type: ignore[arg-type]


def test_skip_is_refused_with_an_outer_optimizer_of_the_mean() -> None:
    with pytest.raises(ValueError, match="nonfinite='skip' with outer"):
        offbeat.local_sgd(outer="SGD(lr=1.0)", nonfinite="skip")


@pytest.mark.parametrize("method", ["sgp", "d_psgd", "local_sgd", "daso", "ad_psgd"])
def test_another_word_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="nonfinite='ignore', expected 'raise' or 'skip'"):
        offbeat.algorithm(f"{method}(nonfinite='ignore')")
