"""A save that is interrupted at any moment leaves one whole save in the folder."""

import itertools
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adam

import offbeat
from offbeat.comm.world import World
from offbeat.replica.rank_files import RankFiles
from offbeat.testing import ThreadWorld
from problems import Quadratic, loss
from ranks import Spawned

pytestmark = pytest.mark.usefixtures("fast_heartbeat")
OLD, NEW = 4, 8
NOTHING, PART, NEXT, SWITCHED = range(4)  # how far a rank came


def build(world: World | None = None) -> tuple[Quadratic, Adam, offbeat.Replica]:
    model = Quadratic()
    optimizer = Adam(model.parameters(), lr=0.1)
    return model, optimizer, offbeat.replicate(model, offbeat.sgp(), mesh=world)


def train(parts: tuple[Quadratic, Adam, offbeat.Replica], steps: int) -> None:
    model, optimizer, replica = parts
    for step in range(steps):
        loss(model, replica.world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def values(model: Quadratic) -> list[float]:
    return [*model.matrix.flatten().tolist(), *model.vector.tolist()]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Any]]]:
    """Two saves of a run, and the parameters of each rank at both moments."""
    root = tmp_path_factory.mktemp("saves")

    def work(world: World) -> list[Any]:
        parts = build(world)
        kept = []
        for step in (OLD, NEW):
            train(parts, 4)
            offbeat.save_per_rank(root / str(step), replica=parts[2], optimizer=parts[1])
            kept.append(values(parts[0]))
        parts[2].finish()
        parts[2].detach()
        return kept

    old, new = zip(*ThreadWorld(2).run(work), strict=True)
    return root, {OLD: [*old], NEW: [*new]}


# How far both ranks can have come: none switches before all have written.
MOMENTS = [
    pair
    for pair in itertools.product(range(4), repeat=2)
    if SWITCHED not in pair or min(pair) >= NEXT
]


@pytest.mark.filterwarnings("ignore:a save in:RuntimeWarning")
@pytest.mark.fault(
    "a rank is killed at any moment of `save_per_rank`",
    "the next `load_per_rank` loads one step on all ranks: the last save, or the new one if all "
    "ranks had written it",
)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_kill_at_every_moment_leaves_a_whole_save(
    moment: tuple[int, int], saves: tuple[Path, dict[int, list[Any]]], tmp_path: Path
) -> None:
    root, kept = saves
    for rank, progress in enumerate(moment):
        name = f"offbeat-rank{rank}"
        shutil.copy(root / str(OLD) / f"{name}.pt", tmp_path)
        new = root / str(NEW) / f"{name}.pt"
        target = {PART: f"{name}.next.pt.part", NEXT: f"{name}.next.pt", SWITCHED: f"{name}.pt"}
        if progress in target:
            shutil.copy(new, tmp_path / target[progress])

    def work(world: World) -> list[float]:
        model, optimizer, replica = parts = build(world)
        offbeat.load_per_rank(tmp_path, replica=replica, optimizer=optimizer)
        loaded = [float(replica.steps), *values(model)]
        train(parts, 1)
        offbeat.save_per_rank(tmp_path, replica=replica, optimizer=optimizer)
        replica.finish()
        replica.detach()
        return loaded

    expected = NEW if min(moment) >= NEXT else OLD
    for rank, (step, *found) in enumerate(ThreadWorld(2).run(work)):
        assert step == expected
        assert found == kept[expected][rank]
    assert {path.name for path in tmp_path.iterdir() if "part" not in path.name} == {
        "offbeat-rank0.pt",
        "offbeat-rank1.pt",
    }


def test_the_step_that_was_taken_is_named(
    saves: tuple[Path, dict[int, list[Any]]], tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copy(saves[0] / str(OLD) / f"offbeat-rank{rank}.pt", tmp_path)
    shutil.copy(saves[0] / str(NEW) / "offbeat-rank1.pt", tmp_path / "offbeat-rank1.next.pt")

    def work(world: World) -> None:
        _, optimizer, replica = build(world)
        offbeat.load_per_rank(tmp_path, replica=replica, optimizer=optimizer)
        replica.detach()

    with pytest.warns(RuntimeWarning, match="was interrupted; .* all ranks have is of step 4"):
        ThreadWorld(2).run(work)


def killed(rank: int, results: Any, folder: str) -> None:
    """Save twice; rank 1 is killed when it would put its second file in its place."""
    _, optimizer, replica = parts = build()
    train(parts, OLD)
    offbeat.save_per_rank(folder, replica=replica, optimizer=optimizer)
    train(parts, NEW - OLD)
    if rank == 1:
        RankFiles.switch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    offbeat.save_per_rank(folder, replica=replica, optimizer=optimizer)
    results.put((rank, "saved"))
    results.close()
    results.join_thread()
    os._exit(0)  # the other rank is gone


def resumed(rank: int, results: Any, folder: str) -> None:
    _, optimizer, replica = build()
    offbeat.load_per_rank(folder, replica=replica, optimizer=optimizer)
    results.put(replica.steps)
    replica.finish()
    replica.detach()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:a save in:RuntimeWarning")
def test_a_killed_process_costs_no_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    assert Spawned(killed, 2, folder).join(60) == [(0, "saved")]
    assert Spawned(resumed, 2, folder).join(60) == [NEW, NEW]


@pytest.mark.fault(
    "the disk is full while a rank saves its state",
    "`ValueError` on all ranks: folder, cause and free space; the last save is whole",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "1"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=True)

    def work(world: World) -> str:
        folder = tmp_path / str(world.rank)
        _, optimizer, replica = parts = build(world)
        train(parts, OLD)
        offbeat.save_per_rank(folder, replica=replica, optimizer=optimizer)
        train(parts, 1)
        if world.rank == 1:
            with suppress(OSError), (small / "other").open("wb", buffering=0) as other:
                while True:
                    other.write(bytes(1024))
        with pytest.raises(
            ValueError, match=r"rank 1: cannot write .* 0.0 MB are free there"
        ) as error:
            offbeat.save_per_rank(folder, replica=replica, optimizer=optimizer)
        left = {path.name for path in folder.iterdir()}
        offbeat.load_per_rank(folder, replica=replica, optimizer=optimizer)
        found = replica.steps
        replica.detach()
        assert left <= {f"offbeat-rank{world.rank}.pt", "other"}
        assert found == OLD
        return str(error.value)

    try:
        assert len({*ThreadWorld(2).run(work)}) == 1
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_refused_load_changes_nothing(tmp_path: Path) -> None:
    """Also on the ranks whose own file was whole."""

    def work(world: World) -> None:
        _, optimizer, replica = parts = build(world)
        train(parts, OLD)
        offbeat.save_per_rank(tmp_path, replica=replica, optimizer=optimizer)
        train(parts, 2)
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        replica.gather("saved")
        if world.rank == 1:
            (tmp_path / "offbeat-rank1.pt").write_bytes(b"torn")
        replica.gather("torn")
        with pytest.raises(ValueError, match="rank 1: cannot load the per-rank state"):
            offbeat.load_per_rank(tmp_path, replica=replica, optimizer=optimizer)
        after = [state["exp_avg"] for state in optimizer.state.values()]
        assert all(map(torch.equal, moments, after))
        assert replica.steps == OLD + 2
        replica.detach()

    ThreadWorld(2).run(work)
