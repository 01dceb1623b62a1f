"""What frameworks need of a replica: its own file per rank, and saves in the middle of things."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from outcomes import alike
from problems import seeded
from recipe_cases import CASES, Case, of_each_recipe

pytestmark = pytest.mark.usefixtures("fast_heartbeat")


def build(
    world: World, text: str, elastic: bool = False
) -> tuple[nn.Module, Optimizer, offbeat.Replica]:
    model = seeded(0, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = Adam(model.parameters(), lr=0.01)
    given = {"mesh": world, "optimizer": optimizer, "elastic": elastic}
    return model, optimizer, offbeat.replicate(model, offbeat.algorithm(text), **given)


def backward(model: nn.Module, rank: int, step: int) -> None:
    batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * rank + step))
    model(batch).square().sum().backward()


def train(
    model: nn.Module, optimizer: Optimizer, replica: offbeat.Replica, steps: range
) -> dict[str, Tensor]:
    for step in steps:
        backward(model, replica.world.rank, step)
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    return snapshot(model)


def same(one: Any, other: Any) -> bool:
    """Compare nested dicts and lists with tensors, bit for bit."""
    if isinstance(one, Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("text", ["ddp", "sgp(overlap=1)", "local_sgd(every=4)", "lags(0.3)"])
def test_a_run_resumes_bit_for_bit_from_its_own_files(text: str, tmp_path: Path) -> None:
    def work(world: World) -> None:
        parts = build(world, text)
        train(*parts, range(5))
        model, optimizer, replica = parts
        offbeat.save_per_rank(tmp_path / "new", replica=replica, optimizer=optimizer)
        shown = copy.deepcopy(model.state_dict())
        expected = train(*parts, range(5, 9))
        replica.detach()

        again = build(world, text)
        again[0].load_state_dict(shown)
        offbeat.load_per_rank(tmp_path / "new", replica=again[2], optimizer=again[1])
        assert same(train(*again, range(5, 9)), expected)
        again[2].detach()

    ThreadWorld(2).run(work)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "offbeat-save1-rank0-of-2.pt",
        "offbeat-save1-rank1-of-2.pt",
    ]


def test_another_number_of_ranks_after_finish(tmp_path: Path) -> None:
    moments: list[Any] = []

    def save(world: World) -> None:
        parts = build(world, "sgp")
        train(*parts, range(3))
        parts[2].finish()
        offbeat.save_per_rank(tmp_path, replica=parts[2], optimizer=parts[1])
        moments.append((world.rank, copy.deepcopy(parts[1].state_dict()), snapshot(parts[0])))
        parts[2].detach()

    def load(world: World) -> None:
        model, optimizer, replica = build(world, "local_sgd(every=2)")
        offbeat.load_per_rank(tmp_path, replica=replica, optimizer=optimizer)
        _, expected, parameters = sorted(moments)[world.rank if world.rank < 2 else 0]
        assert same(optimizer.state_dict(), expected)
        found = snapshot(model)
        assert all(same(found[name], parameters[name]) for name in found)
        assert replica.stats()["step"] == 3
        replica.detach()

    ThreadWorld(2).run(save)
    ThreadWorld(3).run(load)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", ["ddp", "sgp(overlap=1)", "local_sgd(every=4)", "lags(0.3)"])
def test_ranks_with_other_numbers_go_on_bit_for_bit(text: str, tmp_path: Path) -> None:
    """Those of a run that has lost one: the ranks 0, 2 and 3 start again as 0, 1 and 2."""
    ends: dict[int, dict[str, Tensor]] = {}

    def save(world: World) -> None:
        model, optimizer, replica = build(world, text, elastic=True)
        train(model, optimizer, replica, range(2))
        early = replica.state_dict()
        if world.rank == 1:
            assert replica._connection.links is not None
            replica._connection.links.heartbeat._end_thread()
            return
        train(model, optimizer, replica, range(2, 12))
        replica.load_state_dict(early)  # of four ranks, one of which is lost since
        last = replica.steps + 3
        train(model, optimizer, replica, range(replica.steps, last))
        offbeat.save_per_rank(tmp_path, replica=replica, optimizer=optimizer, model=model)
        ends[world.rank] = train(model, optimizer, replica, range(last, last + 4))
        replica.detach()

    def load(world: World) -> None:
        model, optimizer, replica = build(world, text)
        parts = {"replica": replica, "optimizer": optimizer, "model": model}
        assert offbeat.load_per_rank(tmp_path, missing_ok=True, **parts)
        assert replica.steps == 5
        rank = sorted(ends)[world.rank]
        for step in range(5, 9):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        assert same(snapshot(model), ends[rank])
        replica.detach()

    with pytest.warns(RuntimeWarning, match="lost"):
        ThreadWorld(4).run(save)
    assert sorted(ends) == [0, 2, 3]
    ThreadWorld(3).run(load)


def test_ranks_with_other_numbers_need_all_files(tmp_path: Path) -> None:
    def work(world: World) -> None:
        parts = build(world, "sgp")
        train(*parts, range(2))
        offbeat.save_per_rank(tmp_path / "all", replica=parts[2])
        parts[2].detach()

    ThreadWorld(2).run(work)
    for rank, other in ((0, 0), (1, 5)):  # as on nodes that see their own files only
        (tmp_path / str(rank)).mkdir()
        file = tmp_path / "all" / f"offbeat-save1-rank{rank}-of-2.pt"
        file.rename(tmp_path / str(rank) / f"offbeat-save1-rank{other}-of-2.pt")

    def load(world: World) -> None:
        _, _, replica = build(world, "sgp")
        offbeat.load_per_rank(tmp_path / str(world.rank), missing_ok=True, replica=replica)

    with pytest.raises(ValueError, match="where they see all files"):
        ThreadWorld(2).run(load)


def test_numbers_of_numpy_are_read_again(tmp_path: Path) -> None:
    model, optimizer, replica = build(ThreadWorld(1).world(0), "ddp")
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 7)))
    train(model, optimizer, replica, range(1))
    schedule.step()
    parts = {"replica": replica, "optimizer": optimizer, "schedule": schedule}
    before = copy.deepcopy(optimizer.state_dict())
    offbeat.save_per_rank(tmp_path, **parts)
    assert offbeat.load_per_rank(tmp_path, **parts)
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize("name", ["with space", "[a*b]?{x}", "memory://a/b"])
def test_any_name_of_a_folder(name: str, tmp_path: Path) -> None:
    folder = name if "://" in name else str(tmp_path / name)

    def work(world: World) -> None:
        parts = build(world, "sgp")
        expected = train(*parts, range(2))
        offbeat.save_per_rank(folder, replica=parts[2], optimizer=parts[1])
        parts[2].detach()
        again = build(world, "sgp")
        offbeat.load_per_rank(folder, replica=again[2], optimizer=again[1])
        found = snapshot(again[0])
        assert all(same(found[name], expected[name]) for name in found)
        again[2].detach()

    ThreadWorld(2).run(work)


def test_fewer_ranks_save_to_a_folder_of_more(tmp_path: Path) -> None:
    """They replace the checkpoint: another number of ranks finds theirs alone."""
    saved(tmp_path, 4, "ddp")
    saved(tmp_path, 2, "ddp", 3)
    assert len([*tmp_path.iterdir()]) == 2

    def work(world: World) -> None:
        _, optimizer, replica = build(world, "ddp")
        offbeat.load_per_rank(tmp_path, replica=replica, optimizer=optimizer)
        assert replica.steps == 3
        replica.detach()

    ThreadWorld(4).run(work)


def failing_load(folder: Path, text: str = "sgp", **more: Any) -> Callable[[World], None]:
    def work(world: World) -> None:
        _, optimizer, replica = build(world, text)
        offbeat.load_per_rank(folder, replica=replica, optimizer=optimizer, **more)

    return work


def saved(folder: Path, ranks: int = 2, text: str = "sgp", steps: int = 2) -> None:
    def work(world: World) -> None:
        parts = build(world, text)
        train(*parts, range(steps))
        offbeat.save_per_rank(folder, replica=parts[2], optimizer=parts[1])
        parts[2].detach()

    ThreadWorld(ranks).run(work)


@pytest.mark.fault(
    "a rank's own file is missing from a checkpoint",
    "ValueError on all ranks; names the rank and says that every rank saves its own",
    group="Checkpoints",
)
def test_a_missing_file_is_named_on_all_ranks(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "offbeat-save1-rank1-of-2.pt").unlink()
    text = alike(failing_load(tmp_path))
    assert "rank 1's file is missing, found those of the ranks [0]" in text
    assert "every rank saves and loads its own" in text


@pytest.mark.fault(
    "a rank's own file is torn, or holds other parts",
    "ValueError on all ranks",
    group="Checkpoints",
)
def test_a_torn_file_and_other_parts(tmp_path: Path) -> None:
    saved(tmp_path)
    text = alike(failing_load(tmp_path, scaler=torch.amp.GradScaler("cpu")))
    assert "holds ['replica', 'optimizer'], got ['replica', 'optimizer', 'scaler']" in text
    path = tmp_path / "offbeat-save1-rank1-of-2.pt"
    path.write_bytes(path.read_bytes()[:1000])
    assert "cannot load the per-rank state" in alike(failing_load(tmp_path))


def test_the_optimizer_of_one_rank_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)

    def work(world: World) -> None:
        model, optimizer, replica = build(world, "sgp")
        if world.rank == 1:
            optimizer = Adam([{"params": [p]} for p in model.parameters()])
        offbeat.load_per_rank(tmp_path, replica=replica, optimizer=optimizer)

    assert "rank 1: cannot load" in alike(work)


def test_parts_without_a_replica(tmp_path: Path) -> None:
    optimizer = Adam(nn.Linear(1, 1).parameters())
    for call in (offbeat.save_per_rank, offbeat.load_per_rank):
        with pytest.raises(ValueError, match=r"\['optimizer'\] without a replica"):
            call(tmp_path, optimizer=optimizer)


@pytest.mark.fault(
    "the state of one rank is loaded on all ranks",
    "ValueError on all ranks; names the rank whose entry is missing",
    group="Checkpoints",
)
def test_the_state_of_rank_0_on_all_ranks() -> None:
    """As frameworks do with objects that are registered for checkpoints."""
    box: list[Any] = []

    def work(world: World) -> None:
        parts = build(world, "sgp")
        train(*parts, range(2))
        state = parts[2].state_dict()
        if world.rank == 0:
            box.append(state)
        parts[2].detach()
        again = build(world, "sgp")
        again[2].load_state_dict(box[0])

    text = alike(work)
    assert "rank 1: its entry is missing, found ['rank0']: every rank saves" in text
    assert "number of ranks" not in text


@pytest.mark.parametrize(
    "case", of_each_recipe(case for case in CASES if case.reference), ids=lambda case: case.text
)
def test_the_state_inside_consensus_is_that_of_training(case: Case) -> None:
    def work(world: World) -> None:
        model, optimizer, replica = build(world, case.text)
        train(model, optimizer, replica, range(3))
        before = copy.deepcopy(replica.state_dict())
        with replica.consensus():
            average = copy.deepcopy(model.state_dict())
            inside = replica.state_dict()
            with replica.consensus():
                assert same(model.state_dict(), average)
            assert same(model.state_dict(), average)
        assert same(inside, before)
        assert same(replica.state_dict(), before)
        replica.detach()

    ThreadWorld(nodes=[[0, 1], [2, 3]]).run(work)


@pytest.mark.parametrize("text", ["ddp", "sgp(overlap=1)", "lags(0.3)", "daso(total_steps=20)"])
def test_a_save_in_the_middle_of_an_accumulation(text: str) -> None:
    """The accumulated gradients are dropped by the resumed run, and only they."""

    def work(world: World) -> None:
        model, optimizer, replica = build(world, text)
        train(model, optimizer, replica, range(3))
        before = copy.deepcopy(replica.state_dict())
        replica.set_requires_sync(False)
        backward(model, world.rank, 3)
        now = replica.state_dict()[f"rank{world.rank}"]
        then = before[f"rank{world.rank}"]
        for part in ("step", "gradients", "parameters"):
            assert same(now[part], then[part])
        replica.set_requires_sync(True)
        replica.state_dict()
        backward(model, world.rank, 4)
        with pytest.raises(ValueError, match="after a backward that no step"):
            replica.state_dict()
        optimizer.step()
        replica.step()
        replica.detach()

    ThreadWorld(2).run(work)


def test_gradients_that_another_replica_left(tmp_path: Path) -> None:
    """In a GAN the backward of the generator reaches the critic, which discards them."""

    def work(world: World) -> None:
        generator, critic = (build(world, "ddp") for _ in range(2))
        bridge = nn.Linear(1, 3)
        for step in range(2):
            backward(critic[0], world.rank, step)
            critic[1].step()
            critic[2].step()
            batch = torch.randn(5, 3)
            critic[0](bridge(generator[0](batch))).sum().backward()
            generator[1].step()
            generator[2].step()
            offbeat.save_per_rank(tmp_path, generator=generator[2], critic=critic[2])
            critic[1].zero_grad()
        for parts in (generator, critic):
            parts[2].detach()

    ThreadWorld(2).run(work)
