"""A save that is interrupted at any moment leaves one whole save in the folder."""

import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

import offbeat
from offbeat.replica.saving.rank_files import RankFiles, Save
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import Quadratic, loss
from ranks import Spawned

pytestmark = pytest.mark.usefixtures("fast_heartbeat")
OLD, NEW = 4, 8
NOTHING, PART, WRITTEN, REMOVED = range(4)  # how far a rank came
KILLS = int(os.environ.get("OFFBEAT_TEST_KILLS", "4"))

Parts = dict[str, Any]


def build(world: World | None = None, model: nn.Module | None = None) -> Parts:
    model = Quadratic() if model is None else model
    optimizer = Adam(model.parameters(), lr=0.1)
    replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
    return {"optimizer": optimizer, "replica": replica}


def train(parts: Parts, steps: int) -> None:
    replica = parts["replica"]
    for _ in range(steps):
        loss(replica.model, replica.world.rank, replica.steps).backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        replica.step()


def values(parts: Parts) -> list[float]:
    return [
        parts["replica"].steps,
        *(x for p in parts["replica"].model.parameters() for x in p.flatten().tolist()),
    ]


def name(save: int, rank: int) -> str:
    return f"offbeat-save{save}-rank{rank}-of-2.pt"


Saves = tuple[dict[int, Path], dict[int, list[Any]]]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """Two saves of a run in folders of their own, and the values of each rank at both moments."""
    folders = {step: tmp_path_factory.mktemp(str(step)) for step in (OLD, NEW)}

    def work(world: World) -> list[Any]:
        parts, kept = build(world), []
        for folder in folders.values():
            train(parts, 4)
            offbeat.save_per_rank(folder, **parts)
            kept.append(values(parts))
        parts["replica"].detach()
        return kept

    old, new = zip(*ThreadWorld(2).run(work), strict=True)
    return folders, {OLD: [*old], NEW: [*new]}


def interrupt(folder: Path, saves: Saves, rank: int, progress: int) -> None:
    """Leave in ``folder`` what a rank that is killed in the second save leaves."""
    old, new = (saves[0][step] / name(1, rank) for step in (OLD, NEW))
    folder.mkdir(exist_ok=True)
    if progress < REMOVED:
        shutil.copy(old, folder / name(1, rank))
    if progress == PART:
        (folder / f"{name(2, rank)}.part").write_bytes(new.read_bytes()[:1000])
    elif progress > PART:
        shutil.copy(new, folder / name(2, rank))


# How far both ranks can have come: none removes its old file before all have written new ones.
MOMENTS = [
    pair
    for pair in itertools.product(range(4), repeat=2)
    if REMOVED not in pair or min(pair) >= WRITTEN
]


@pytest.mark.filterwarnings("ignore:the last save in:RuntimeWarning")
@pytest.mark.fault(
    "a rank is killed while it saves by `save_per_rank`",
    "all load the last save or the new one",
    group="Checkpoints",
)
@pytest.mark.parametrize(
    ("moment", "shared"),  # one folder, or a folder for each rank
    [*zip(MOMENTS, itertools.cycle([True, False]), strict=False)],
    ids=str,
)
def test_a_kill_at_every_moment_leaves_a_whole_save(
    moment: tuple[int, int], shared: bool, saves: Saves, tmp_path: Path
) -> None:
    folders = [tmp_path / "v1.0" if shared else tmp_path / f"node.{rank}" for rank in range(2)]
    for rank, progress in enumerate(moment):
        interrupt(folders[rank], saves, rank, progress)
    before = sorted(tmp_path.rglob("*"))

    def work(world: World) -> list[float]:
        parts, folder = build(world), folders[world.rank]
        assert offbeat.load_per_rank(folder, **parts)
        loaded = values(parts)
        parts["replica"].gather("loaded")
        assert sorted(tmp_path.rglob("*")) == before  # whoever saves there now is not disturbed
        parts["replica"].gather("compared")
        train(parts, 1)
        offbeat.save_per_rank(folder, **parts)
        parts["replica"].detach()
        return loaded

    found = ThreadWorld(2).run(work)
    assert found == saves[1][NEW if min(moment) >= WRITTEN else OLD]
    left = sorted(path.name for path in tmp_path.rglob("*.pt*"))
    assert left == [name(2 if max(moment) < WRITTEN else 3, rank) for rank in range(2)]


def test_the_step_that_was_taken_is_named(saves: Saves, tmp_path: Path) -> None:
    interrupt(tmp_path, saves, 0, NOTHING)
    interrupt(tmp_path, saves, 1, WRITTEN)

    def work(world: World) -> None:
        parts = build(world)
        offbeat.load_per_rank(tmp_path, **parts)
        parts["replica"].detach()

    with pytest.warns(RuntimeWarning, match="was interrupted; .* all ranks have, of step 4"):
        ThreadWorld(2).run(work)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_load_right_after_a_save_warns_of_no_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may look while another one still removes its file of the save before."""
    remove = RankFiles.remove_before

    def late(files: RankFiles, save: Save, rank: int, ranks: Sequence[int]) -> None:
        time.sleep(0.2 * (rank == 1))
        remove(files, save, rank, ranks)

    monkeypatch.setattr(RankFiles, "remove_before", late)

    def work(world: World) -> None:
        parts = build(world)
        for _ in range(3):
            train(parts, 1)
            offbeat.save_per_rank(tmp_path, **parts)
            offbeat.load_per_rank(tmp_path, **parts)
        assert parts["replica"].steps == 3
        parts["replica"].detach()

    ThreadWorld(2).run(work)


def test_the_newest_save_is_the_last_one_whatever_its_step(saves: Saves, tmp_path: Path) -> None:
    """A run that starts anew in the folder of an earlier one has done fewer steps."""
    for rank in range(2):
        shutil.copy(saves[0][NEW] / name(1, rank), tmp_path / name(1, rank))
        shutil.copy(saves[0][OLD] / name(1, rank), tmp_path / name(2, rank))

    def work(world: World) -> int:
        parts = build(world)
        offbeat.load_per_rank(tmp_path, **parts)
        parts["replica"].detach()
        return int(parts["replica"].steps)

    assert ThreadWorld(2).run(work) == [OLD, OLD]


def test_a_save_of_an_earlier_version(saves: Saves, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copy(saves[0][OLD] / name(1, rank), tmp_path / f"offbeat-rank{rank}.pt")

    def work(world: World) -> list[float]:
        parts = build(world)
        offbeat.load_per_rank(tmp_path, **parts)
        found = values(parts)
        offbeat.save_per_rank(tmp_path, **parts)
        parts["replica"].detach()
        return found

    assert ThreadWorld(2).run(work) == saves[1][OLD]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name(1, 0), name(1, 1)]


@pytest.mark.parametrize("progress", [NOTHING, PART, WRITTEN])
def test_a_kill_in_the_first_save(progress: int, saves: Saves, tmp_path: Path) -> None:
    interrupt(tmp_path, saves, 1, progress)
    (tmp_path / name(1, 1)).unlink()

    def work(world: World) -> None:
        parts = build(world)
        assert not offbeat.load_per_rank(tmp_path, missing_ok=True, **parts)
        offbeat.save_per_rank(tmp_path, **parts)
        assert offbeat.load_per_rank(tmp_path, missing_ok=True, **parts)
        parts["replica"].detach()

    ThreadWorld(2).run(work)
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.filterwarnings("ignore:the last save in:RuntimeWarning")
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_takes_the_save_that_is_whole(ranks: int, tmp_path: Path) -> None:
    def save(world: World) -> None:
        parts = build(world)
        train(parts, OLD)
        parts["replica"].finish()
        offbeat.save_per_rank(tmp_path, **parts)
        parts["replica"].detach()

    ThreadWorld(2).run(save)
    shutil.copy(tmp_path / name(1, 0), tmp_path / name(2, 0))

    def work(world: World) -> None:
        parts = build(world)
        offbeat.load_per_rank(tmp_path, **parts)
        assert parts["replica"].steps == OLD
        offbeat.save_per_rank(tmp_path, **parts)
        parts["replica"].detach()

    ThreadWorld(ranks).run(work)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"offbeat-save3-rank{rank}-of-{ranks}.pt" for rank in range(ranks)]


@pytest.mark.fault(
    "the disk is full while a rank saves its state",
    "ValueError on all ranks: folder, cause and free space; the last save is whole",
    group="Checkpoints",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "1"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=True)

    def work(world: World) -> str:
        folder, parts = tmp_path / str(world.rank), build(world)
        train(parts, OLD)
        offbeat.save_per_rank(folder, **parts)
        train(parts, 1)
        if world.rank == 1:
            with suppress(OSError), (small / "other").open("wb", buffering=0) as other:
                while True:
                    other.write(bytes(1024))
        with pytest.raises(ValueError, match="rank 1: cannot write its state to ") as error:
            offbeat.save_per_rank(folder, **parts)
        left = {path.name for path in folder.iterdir()}
        offbeat.load_per_rank(folder, **parts)
        found = parts["replica"].steps
        parts["replica"].detach()
        assert left <= {name(1, world.rank), "other"}
        assert found == OLD
        return str(error.value)

    try:
        (text,) = {*ThreadWorld(2).run(work)}
        assert text.endswith("No space left on device; 0.0 MB are free there")
    finally:
        subprocess.run(["umount", small], check=True)


def test_what_is_written_is_on_the_disk_before_anyone_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that crashes keeps the file and its name, or the save before."""
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def remove(files: RankFiles, *_: Any) -> None:
        assert {f"{name(1, rank)}.part" for rank in range(2)} < {*synced}
        assert synced.count("new") == synced.count(tmp_path.name) == 2

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(RankFiles, "remove_before", remove)

    def work(world: World) -> None:
        parts = build(world)
        offbeat.save_per_rank(tmp_path / "new", **parts)
        parts["replica"].detach()

    ThreadWorld(2).run(work)


def log(path: str, *words: object) -> None:
    with Path(path).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def digest(parts: Parts) -> str:
    moments = [state["exp_avg"] for state in parts["optimizer"].state.values()]
    tensors = [*parts["replica"].model.parameters(), *moments]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:12]


def life(rank: int, results: Any, folder: str, path: str) -> None:
    """Resume, then save after every step until killed."""
    torch.manual_seed(0)
    model = nn.Linear(400, 100)  # half a megabyte with the optimizer
    parts = build(model=model)
    offbeat.load_per_rank(folder, missing_ok=True, **parts)
    replica = parts["replica"]
    log(path, "loaded", rank, replica.steps, digest(parts))
    while True:
        batch = torch.randn(2, 400, generator=torch.Generator().manual_seed(replica.steps + rank))
        model(batch).square().sum().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        replica.step()
        log(path, "saves", rank, replica.steps, digest(parts))
        offbeat.save_per_rank(folder, **parts)
        log(path, "saved", rank, replica.steps, digest(parts))


def lines(path: Path) -> list[tuple[str, int, int, str]]:
    split = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(what, int(rank), int(step), found) for what, rank, step, found in split]


def kill(spawned: Spawned, path: Path, draws: random.Random) -> None:
    """Kill one rank at a random moment after both have resumed, and soon the other."""
    deadline = time.monotonic() + 60
    while sum(line[0] == "loaded" for line in lines(path)) < 2:
        assert any(p.is_alive() for p in spawned.processes), "no rank could resume"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(draws.uniform(0, 0.3))
    victims = draws.sample(spawned.processes, 2)
    for process in victims:
        os.kill(process.pid, signal.SIGKILL)
        time.sleep(draws.choice([0, draws.uniform(0, 0.05)]))
    for process in victims:
        process.join()


@pytest.mark.processes
@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.fault(
    "a process is killed while it saves again and again",
    "every restart resumes from the last whole save",
    group="Checkpoints",
)
def test_every_restart_after_a_kill_finds_a_whole_save(
    tmp_path: Path, draws: random.Random
) -> None:
    """Set OFFBEAT_TEST_KILLS for more kills."""
    kept: dict[tuple[int, int], str] = {}
    begun = done = interrupted = 0
    for index in range(KILLS + 1):
        path = tmp_path / f"log{index}"
        kill(Spawned(life, 2, str(tmp_path / "v1.0"), str(path)), path, draws)
        found = lines(path)
        loaded = {rank: (step, state) for what, rank, step, state in found if what == "loaded"}
        assert loaded[0][0] == loaded[1][0]  # one step
        assert done <= loaded[0][0] <= begun
        if begun:
            assert all(state == kept[rank, step] for rank, (step, state) in loaded.items() if step)
            interrupted += begun > done
        kept |= {(rank, step): state for what, rank, step, state in found if what == "saves"}
        begun = max([loaded[0][0], *(step for what, _, step, _ in found if what == "saves")])
        done = max([loaded[0][0], *(step for what, _, step, _ in found if what == "saved")])
    print(f"{KILLS} kills, {interrupted} of them inside a save, {done} steps saved")
