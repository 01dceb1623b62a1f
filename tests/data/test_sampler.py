"""The sampler in data loaders, in worlds of threads, and in processes of which one is killed."""

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import offbeat
from crowd import Crowd
from offbeat.data import ElasticSampler
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from outcomes import errors_of
from problems import Quadratic
from ranks import Spawned
from sampled_runs import Member, Place, pickled

# torchdata 0.11 calls what torch 2.13 has deprecated.
old_call = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset[int]):
    """A data set whose samples are their numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def alone(size: int = 1) -> Member:
    return Member(Place(0, list(range(size))))


def test_a_loader_with_workers_draws_ahead() -> None:
    """Batches that workers hold when a rank is lost are trained on, the others divided anew."""
    replica = alone(2)
    sampler = ElasticSampler(64, 4, replica, shuffle=False, prefetch=4)
    loader = DataLoader(Numbers(64), batch_sampler=sampler, num_workers=2, prefetch_factor=2)
    assert len(loader) == 8
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if replica.steps == 1:
            replica.lost.append({"rank": 1, "step": 1, "used": 1})
        replica.steps += 1
    assert [batch[0] for batch in found[:6]] == [0, 8, 16, 24, 32, 40]
    assert sorted([*chain.from_iterable(found)]) == [*range(4), *range(8, 64)], (
        "all but what rank 1 has used"
    )
    assert sampler.stats() == {"epoch": 0, "left": 0, "returned": 20, "repeated": 0}


def test_drawing_further_ahead_than_allowed_is_an_error() -> None:
    sampler = ElasticSampler(64, 4, alone())
    batches = iter(sampler)
    next(batches)
    with pytest.raises(ValueError, match=r"call replica.step\(\) .* or pass prefetch=1 or more"):
        next(batches)


@old_call
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lost", [False, True])
def test_a_stateful_loader_resumes_in_the_middle(workers: int, lost: bool) -> None:
    """What its workers had fetched and nobody had trained on is not lost, nor what returned."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def attached(replica: Member) -> tuple[ElasticSampler, Any]:
        sampler = ElasticSampler(90, 4, replica, prefetch=2 * workers)
        data = Numbers(90)
        return sampler, loaders.StatefulDataLoader(data, batch_sampler=sampler, num_workers=workers)

    replica, trained = alone(2), []
    sampler, loader = attached(replica)
    for batch in loader:
        trained += batch.tolist()
        if lost and replica.steps == 4:  # after the state of this batch was drawn
            replica.lost.append({"rank": 1, "step": 4, "used": 2})
        replica.steps += 1
        if replica.steps == 5:
            state = pickled(loader.state_dict())
            break
    others = ElasticSampler(90, 4, Member(Place(1, [0, 1])), prefetch=20)
    trained += chain.from_iterable(iter_steps(others, 2 if lost else 5))

    resumed = alone()
    resumed.steps = 5
    sampler, loader = attached(resumed)
    loader.load_state_dict(state)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            trained += batch.tolist()
            resumed.steps += 1
    assert Counter(trained) == dict.fromkeys(range(90), 2)


@old_call
def test_a_stateful_loader_saved_between_epochs_begins_the_next() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    trained: list[int] = []
    state, steps = None, 0
    for epoch in range(3):
        replica = alone()
        replica.steps = steps
        sampler = ElasticSampler(30, 4, replica)
        loader = loaders.StatefulDataLoader(Numbers(30), batch_sampler=sampler)
        if state is not None:
            loader.load_state_dict(state)
        sampler.set_epoch(epoch)
        for batch in loader:
            trained += batch.tolist()
            replica.steps += 1
        state, steps = pickled(loader.state_dict()), replica.steps
    assert Counter(trained) == dict.fromkeys(range(30), 3)


def iter_steps(sampler: ElasticSampler, steps: int) -> list[list[int]]:
    """The batches of the first steps, one for each."""
    batches = iter(sampler)
    return [next(batches) for _ in range(steps)]


def test_survivors_of_a_loss_return_to_a_state_from_before_it() -> None:
    """They train on without the lost rank from that step."""
    replica = alone(2)
    sampler = ElasticSampler(90, 4, replica, prefetch=3)
    others = ElasticSampler(90, 4, Member(Place(1, [0, 1])), prefetch=20)
    trained = [*chain.from_iterable(iter_steps(others, 3))]
    batches = iter(sampler)
    for _ in range(3):
        trained += next(batches)
        replica.steps += 1
    state = pickled(sampler.state_dict())
    for _ in range(3):
        next(batches)
        replica.steps += 1
    replica.lost.append({"rank": 1, "step": 5, "used": 6})
    replica.world.ranks.remove(1)
    replica.steps = 3
    sampler.load_state_dict(state)
    for batch in sampler:
        trained += batch
        replica.steps += 1
    assert Counter(trained) == dict.fromkeys(range(90), 1)


def test_sizes_of_batches_are_part_of_the_state() -> None:
    """Ranks go on with those that were agreed, also before they have begun."""

    def members() -> list[tuple[Member, ElasticSampler]]:
        replicas = [Member(Place(rank, [0, 1, 2])) for rank in range(3)]
        return [(each, ElasticSampler(300, 6, each, prefetch=2, most=9)) for each in replicas]

    pairs = members()
    for replica, sampler in pairs:
        iter_steps(sampler, 3)
        replica.steps, replica.others = 3, ["[0, 1.0]", "[1, 1.0]", "[2, 2.0]"]
        assert sampler.balance() == {0: 7, 1: 7, 2: 4}
        replica.steps = 4
    states = [pickled(sampler.state_dict()) for _, sampler in pairs]
    found: list[list[list[int]]] = []
    for (replica, sampler), state in zip(members(), states, strict=True):
        replica.steps = 4
        sampler.load_state_dict(state)
        found.append(iter_steps(sampler, 3))
    assert [len(batches[0]) for batches in found] == [7, 7, 4]
    replica.others = ["[0, 0]", "[1, 0]", "[2, 0]"]
    assert sampler.balance() == {0: 7, 1: 7, 2: 4}, "no speeds, no change"
    assert len({sample for rows in found for batch in rows for sample in batch}) == 3 * 18


@pytest.mark.parametrize("size", [3, 2])
@pytest.mark.parametrize("is_made_first", [False, True])
def test_the_state_of_a_replica_holds_that_of_its_sampler(size: int, is_made_first: bool) -> None:
    def begin(world: World, state: Any) -> tuple[list[int], Any]:
        replica = offbeat.replicate(Quadratic(), offbeat.local_sgd(every=2), mesh=world)
        sampler = ElasticSampler(60, 4, replica) if is_made_first or not state else None
        if state:
            replica.load_state_dict(state)
        sampler = sampler or ElasticSampler(60, 4, replica)
        used = list[int]()
        for batch in sampler:
            used += batch
            replica.step()
            if replica.steps == 3 and not state:
                replica.finish()
                state = pickled(replica.state_dict())
                break
        replica.detach()
        return used, state

    before = ThreadWorld(3).run(lambda world: begin(world, None))
    whole = {key: entry for _, state in before for key, entry in state.items()}
    after = ThreadWorld(size).run(lambda world: begin(world, whole))
    used = [sample for samples, _ in (*before, *after) for sample in samples]
    assert sorted(used) == [*range(60)]


def test_steps_without_batches_take_no_samples() -> None:
    """They are made, or loaded by a replica whose checkpoint has no sampler."""
    replica = alone()
    sampler = ElasticSampler(60, 4, replica)
    for epoch in range(2):
        replica.steps += 5
        if epoch == 0:
            with pytest.raises(ValueError, match=r"step 0, but .* made 5 steps.* call set_epoch"):
                next(iter(sampler))
        sampler.set_epoch(epoch)
        assert sampler.stats()["left"] == 60
        used = list[int]()
        for number, batch in enumerate(sampler):
            used += batch
            replica.steps += 1
            if number == 3:
                sampler.set_epoch(epoch)  # which has begun
                break
        for batch in sampler:
            used += batch
            replica.steps += 1
        assert sorted(used) == [*range(60)]


def test_what_the_loaded_state_lacks_is_named() -> None:
    def work(world: World) -> int:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        replica.step()
        ElasticSampler(60, 4, replica)
        state = replica.state_dict()
        replica.detach()
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        sampler = ElasticSampler(61, 4, replica)
        lacks = "nothing of 'sampler of 61 with seed 0', only of 'sampler of 60 with seed 0'"
        with pytest.warns(RuntimeWarning, match=lacks):
            replica.load_state_dict(state)
        sampler.set_epoch(0)
        return len([*chain.from_iterable(iter_steps(sampler, 1))]) + sampler.stats()["left"]

    assert ThreadWorld(1).run(work) == [4 + 61]


def test_a_sampler_may_be_a_part_of_a_save_too(tmp_path: Path) -> None:
    def work(world: World) -> list[int]:
        used = list[int]()
        for _ in range(2):
            replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
            sampler = ElasticSampler(20, 4, replica)
            parts = {"sampler": sampler, "replica": replica}
            offbeat.load_per_rank(tmp_path, missing_ok=True, **parts)
            for batch in sampler:
                used += batch
                replica.step()
                if replica.steps == 3:
                    offbeat.save_per_rank(tmp_path, **parts)
                    break
            replica.detach()
        return used

    assert sorted(*ThreadWorld(1).run(work)) == [*range(20)]


def test_a_step_that_was_made_without_its_batch_is_an_error() -> None:
    """Here each batch is followed by a step, although two make one."""
    replica = alone()
    batches = iter(ElasticSampler(64, 4, replica, accumulate=2))
    for _ in range(2):
        next(batches)
        replica.steps += 1
    with pytest.raises(
        ValueError, match=r"step 1 when .* made 2 steps.* once after each 2 batches"
    ):
        next(batches)


def test_a_state_needs_the_replica_of_its_step() -> None:
    replica = alone()
    replica.steps = 3
    state = pickled(ElasticSampler(90, 4, replica).state_dict())
    sampler = ElasticSampler(90, 4, alone())
    sampler.load_state_dict(state)
    assert pickled(sampler.state_dict()) == state, "what is loaded may be saved before it is used"
    with pytest.raises(ValueError, match="of step 3, but the replica has made 0 steps; load"):
        next(iter(sampler))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"length": 91}, "with length=90, this one has length=91; use the same data set"),
        ({"seed": 1}, "with seed=0, this one has seed=1"),
        ({"shuffle": False}, "with shuffle=True, this one has shuffle=False"),
    ],
)
def test_a_state_of_other_data_is_refused(changed: dict[str, Any], said: str) -> None:
    given = {"length": 90, "batch_size": 4}
    state = ElasticSampler(replica=alone(), **given).state_dict()
    with pytest.raises(ValueError, match=said):
        ElasticSampler(replica=alone(), **{**given, **changed}).load_state_dict(state)
    with pytest.raises(ValueError, match="pass what ElasticSampler"):
        ElasticSampler(replica=alone(), **given).load_state_dict({"length": 90})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"length": 0}, r"length=0, expected a whole number in \[1, "),
        ({"length": 1.5}, "length=1.5, expected"),
        ({"length": 2}, "length=2, expected 3 or more for one step of 3 batches"),
        ({"drop_last": True, "batch_size": 40}, "length=90, expected 120 or more"),
        ({"batch_size": 0}, "batch_size=0, expected a whole number, 1 or more"),
        ({"accumulate": 0}, "accumulate=0, expected"),
        ({"prefetch": -1}, "prefetch=-1, expected"),
        ({"seed": -1}, "seed=-1, expected"),
        ({"shuffle": None}, "shuffle=None, expected"),
        ({"length": 91}, "rank 1: ElasticSampler got .*'length': 91.*, but rank 0: .*'length': 90"),
        ({"seed": 7}, "use the same data set and settings on all ranks"),
        ({"batch_size": 5}, "rank 1: ElasticSampler got .*'batch_size': 5"),
    ],
)
def test_wrong_arguments_of_one_rank_are_one_error_on_all(
    changed: dict[str, Any], said: str
) -> None:
    def work(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        given = {"length": 90, "batch_size": 4} | (changed if world.rank == 1 else {})
        ElasticSampler(replica=replica, **given)

    errors = errors_of(work, 3)
    assert {type(error) for error in errors} == {ValueError}
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(ValueError, match=said):
        raise errors[0] or AssertionError


def test_a_rank_that_joined_draws_nothing_before_it_is_told() -> None:
    member = alone(2)
    state = ElasticSampler(90, 4, member).state_dict()
    joined = [{"rank": 2, "step": 2}]
    newcomer = Member(Place(2, [0, 1, 2]), steps=3, joined=joined, is_new=True)
    sampler = ElasticSampler(90, 4, newcomer)
    with pytest.raises(ValueError, match="has joined a run and does not know which samples"):
        next(iter(sampler))
    other = ElasticSampler(90, 4, newcomer, prefetch=2)
    with pytest.raises(ValueError, match="joins with prefetch=2, but the others have prefetch=0"):
        other.load_state_dict(pickled(state))
    sampler.load_state_dict(pickled(state))
    assert len(next(iter(sampler))) == 4


def test_a_rank_that_has_joined_makes_another_sampler_with_the_others() -> None:
    """For a second data set: all have made a step since, and compare their arguments."""
    member = Member(Place(2, [0, 1, 2]), steps=9, joined=[{"rank": 2, "step": 2}])
    assert len(next(iter(ElasticSampler(90, 4, member)))) == 4
    assert member.gathers == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", ["ddp", "local_sgd(every=3)"])
@pytest.mark.fault(
    "a rank joins in the middle of an epoch, and another leaves",
    "each sample is used once",
    group="Ranks that join",
)
def test_each_sample_once_with_a_join_and_a_leave(text: str) -> None:
    length, joined = 900, threading.Event()

    def work(world: World) -> list[int]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, elastic=True)
        sampler, used = ElasticSampler(length, 4, replica), list[int]()
        for batch in sampler:
            time.sleep(0.02)
            model(world.rank).backward()
            model.zero_grad()
            used += batch
            replica.step()
            if replica.joined:
                joined.set()
            if joined.is_set() and world.rank == 1 and not world.is_new:
                replica.leave()
            if replica.has_left:
                return used
        replica.finish()
        assert sampler.stats()["left"] == sampler.stats()["returned"] == 0
        assert (len(replica.joined), len(replica.lost)) == (1, 1)
        replica.detach()
        return used

    crowd = Crowd(3, work)
    crowd.come(crowd.world.newcomer(), after=0.2)
    used = [sample for samples in crowd.all() for sample in samples]
    assert sorted(used) == [*range(length)]


@pytest.mark.usefixtures("impatient")
@pytest.mark.fault(
    "a lost rank is started again under its old number, in the middle of an epoch",
    "each sample is used once",
    group="Ranks that join",
)
def test_each_sample_once_with_a_rank_that_is_started_again() -> None:
    def work(world: World) -> list[int]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, elastic=True)
        sampler, used = ElasticSampler(900, 4, replica, prefetch=4), list[int]()
        for batch in sampler:
            time.sleep(0.02)
            if world.rank == 1 and replica.steps == 5 and not replica.joined:
                links = replica._connection.links
                assert links is not None
                links.heartbeat._end_thread()
                return used + work(world)
            model(world.rank).backward()
            model.zero_grad()
            used += batch
            replica.step()
        replica.finish()
        assert sampler.stats()["left"] == 0
        ((lost,), (joined,)) = replica.lost, replica.joined
        assert (lost["used"], joined["again"]) == (5, 1)
        replica.detach()
        return used

    used = [sample for samples in ThreadWorld(3).run(work) for sample in samples]
    assert sorted(used) == [*range(900)]


def test_an_epoch_is_a_number() -> None:
    with pytest.raises(ValueError, match="epoch=-1, expected a whole number, 0 or more"):
        ElasticSampler(90, 4, alone()).set_epoch(-1)


def test_ranks_of_a_replica_divide_each_epoch() -> None:
    def work(world: World) -> list[list[int]]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.local_sgd(every=2), mesh=world)
        sampler, epochs = ElasticSampler(50, 3, replica), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append([])
            for batch in sampler:
                epochs[-1] += batch
                replica.step()
        replica.detach()
        return epochs

    ranks = ThreadWorld(4).run(work)
    for epoch in range(2):
        assert sorted(sample for epochs in ranks for sample in epochs[epoch]) == list(range(50))
    assert ranks[0][0][:3] != ranks[0][1][:3], "another order in each epoch"


def test_an_earlier_epoch_is_refused_and_a_resumed_one_has_its_whole_length() -> None:
    replica = alone(1)
    sampler = ElasticSampler(40, 4, replica, prefetch=10)
    sampler.set_epoch(1)
    first = iter_steps(sampler, 3)
    replica.steps = 3
    state, again = sampler.state_dict(), ElasticSampler(40, 4, replica, prefetch=10)
    again.load_state_dict(state)
    assert len(again) == 10
    with pytest.raises(ValueError, match=r"epoch=0, but the run is in epoch 1; .*\['epoch'\]"):
        again.set_epoch(0)
    again.set_epoch(again.stats()["epoch"])
    drawn = [*first, *iter_steps(again, 7)]
    assert sorted(sample for batch in drawn for sample in batch) == list(range(40))
    replica.steps = 10
    again.set_epoch(2)
    assert len(again) == 10


@pytest.mark.parametrize(("made", "epoch", "left"), [(2, 0, 1), (3, 1, 3)])
def test_a_run_that_was_saved_after_an_epoch_goes_on_with_the_next(
    made: int, epoch: int, left: int
) -> None:
    """Else what a script does after each epoch, here of three steps, would be done twice."""
    replica = alone(1)
    sampler = ElasticSampler(12, 4, replica)
    for _ in itertools.islice(sampler, made):
        replica.steps += 1
    again = ElasticSampler(12, 4, replica)
    again.load_state_dict(sampler.state_dict())
    assert again.stats()["epoch"] == epoch
    again.set_epoch(epoch)
    for _ in again:
        replica.steps += 1
    assert replica.steps == made + left


def test_a_large_data_set_takes_no_memory() -> None:
    length = 2**40 + 3
    replica = alone(1000)
    sampler = ElasticSampler(length, 8, replica, prefetch=10)
    batches = iter_steps(sampler, 10)
    assert replica.gathers == 1, "when it is made, and in no step"
    assert all(0 <= sample < length for batch in batches for sample in batch)
    assert len({sample for batch in batches for sample in batch}) == 80
    assert len(sampler) == -(-length // 8000)
    assert len(json.dumps(sampler.state_dict())) < 10_000


def _train_two_epochs(rank: int, results: Any, text: str, victim: int, at: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    replica = offbeat.replicate(model, offbeat.algorithm(text), elastic=True)
    sampler = ElasticSampler(1999, 4, replica, prefetch=2)
    # Forked as usual: one of a fork server, the default here, outlives its rank.
    how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(Numbers(1999), batch_sampler=sampler, **how)
    trained = []

    def train() -> None:
        for batch in loader:
            model(batch[:, None] / 1999.0).square().mean().backward()
            if (rank, replica.steps) == (victim, at):
                results.put((rank, {"trained": [*trained, (replica.steps, batch.tolist())]}))
                results.close()
                results.join_thread()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            trained.append((replica.steps, batch.tolist()))
            replica.step()

    for epoch in range(2):
        sampler.set_epoch(epoch)
        train()
    replica.finish()
    while sampler.begin_rest():
        train()
        replica.finish()
    found = {"trained": trained, "lost": replica.lost, "stats": sampler.stats()}
    results.put((rank, found))
    replica.detach()


@pytest.mark.processes
@pytest.mark.parametrize(("text", "every"), [("ddp()", 1), ("local_sgd(every=7)", 7)])
def test_a_killed_process_loses_no_sample(text: str, every: int, draws: random.Random) -> None:
    """It is killed after its backward: the others may have its last gradients, or not.

    What it did alone since the last mean of the models is lost with it.
    """
    victim, at = draws.randrange(4), draws.randrange(20, 200)
    said = dict(Spawned(_train_two_epochs, 4, text, victim, at).join(timeout=100))
    assert set(said) == set(range(4))
    dead = said.pop(victim)
    first = next(iter(said.values()))
    (lost,) = first["lost"]
    assert lost["rank"] == victim
    # The next one cannot begin without it; under ddp it may have given its last gradients.
    assert lost["used"] in ((at, at + 1) if every == 1 else (at - at % every,))
    count = Counter(x for step, batch in dead["trained"] if step < lost["used"] for x in batch)
    for result in said.values():
        assert (result["lost"], result["stats"]) == (first["lost"], first["stats"])
        count.update(sample for _, batch in result["trained"] for sample in batch)
    assert count == dict.fromkeys(range(1999), 2), "twice, in two epochs"
    stats: dict[str, int] = first["stats"]
    assert (stats["left"], stats["repeated"]) == (0, 0)
    assert 4 <= stats["returned"] <= 16 + 4 * every, "of the steps that it made alone or had drawn"
