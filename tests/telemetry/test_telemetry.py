"""The counters that methods are compared by are exact."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim import SGD

import offbeat
from offbeat.telemetry.recording import Recording, read_run
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import Quadratic, loss

MODEL_BYTES = 9 * 8  # the trainable parameters of Quadratic in float64


def stats_of(text: str, size: int, steps: int, nodes: object = None) -> list[dict[str, object]]:
    def worker(world: World) -> dict[str, object]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        before = replica.stats()["total"]["bytes_sent"]
        for step in range(steps):
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        stats = replica.stats()
        stats["sent"] = stats["total"]["bytes_sent"] - before
        replica.detach()
        return stats

    return ThreadWorld(size, nodes).run(worker)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size", "steps", "expected"),
    [
        # One model and a header of 16 bytes to each peer, whatever the size.
        ("sgp", 5, 3, 3 * (MODEL_BYTES + 16)),
        ("sgp('ring')", 5, 3, 3 * 2 * (MODEL_BYTES + 16)),
        # A ring all-reduce sends 2 (n-1)/n of the model; one in three steps.
        ("local_sgd(every=3)", 4, 6, 2 * 2 * 3 * MODEL_BYTES // 4),
        # The shares out and the combinations back, and a matrix of inner products for every
        # parameter: small sums go to the first rank, and from it to each of the others. The first
        # time also three numbers, which tell whether all have the same kernels.
        (
            "adasum(method='gram')",
            4,
            2,
            [
                2 * (2 * 3 * (-(-9 // 4) * 4 * 8) // 4 + times * 2 * 4 * 4 * 8) + times * 24
                for times in (3, 1, 1, 1)
            ],
        ),
        # The same for gradients, two flags and a call number, and the model's buffer of three
        # numbers; once the order of readiness.
        ("ddp", 4, 3, 3 * (2 * 3 * (MODEL_BYTES + 3 * 8) // 4 + 3 * 8) + 2 * 8),
    ],
)
def test_bytes_are_what_the_docstrings_say(
    text: str, size: int, steps: int, expected: int | list[int]
) -> None:
    first = (size - 1) * 80  # the first step also compares the ranks' parameters
    each = expected if isinstance(expected, list) else [expected] * size
    assert [stats["sent"] for stats in stats_of(text, size, steps)] == [n + first for n in each]


def test_a_node_sends_one_model_between_nodes() -> None:
    nodes = ((0, 1, 2), (3, 4, 5))
    # Two steps; each of a node's three ranks sends its third, and a header, to one peer.
    by_axis = [
        stats["bytes_by_axis"] for stats in stats_of("sgp('ring', within='local')", 0, 2, nodes)
    ]
    between = [axis["node"] for axis in by_axis]  # type: ignore[index]
    assert sum(between[:3]) == 2 * (MODEL_BYTES + 3 * 16)


def test_staleness_of_local_sgd_counts_steps_since_the_average() -> None:
    seen = [stats_of("local_sgd(every=3)", 2, steps)[0]["last"]["staleness"] for steps in (1, 2, 3)]  # type: ignore[index]
    assert seen == [1, 2, 0]


def test_stalls_are_the_time_spent_waiting_for_others() -> None:
    def worker(world: World) -> float:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        if world.rank == 1:
            time.sleep(0.5)
        loss(model, world.rank, 0).backward()
        replica.step()
        stalled: float = replica.stats()["last"]["seconds_stalled"]
        replica.detach()
        return stalled

    first, second = ThreadWorld(2).run(worker)
    assert first > 0.3 > second


def test_evaluations_belong_to_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their time nor their bytes count, for the average and for each rank's own model."""
    monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))

    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        for step in range(7):
            loss(model, world.rank, step).backward()
            replica.step()
            if step in (1, 3, 5):
                with replica.consensus():
                    time.sleep(0.5)
                replica.consensus_distance()
            elif step in (2, 4):
                time.sleep(0.5)
                replica.report_loss(1.0, "heldout")
        replica.detach()

    ThreadWorld(3).run(worker)
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert {step["bytes_sent"] for step in steps[1:]} == {MODEL_BYTES + 16}
    # Each evaluation took 0.5 s at least; a busy machine may halt a step, but not each of a kind.
    for kind in (steps[2::2], steps[3::2]):
        assert min(step["seconds"] for step in kind) < 0.5
    assert all(start >= 0 for step in steps for _, start, _ in step["spans"])


def test_the_distance_is_that_of_the_first_finish_after_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))

    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.local_sgd(every=9), mesh=world)
        with torch.no_grad():
            model.vector.add_(world.rank)
        replica.step()
        for _ in range(2):
            replica.finish()
        replica.detach()

    ThreadWorld(2).run(worker)
    assert all(recording.distance > 0.5 for recording in read_run(tmp_path))


def test_the_distance_of_two_replicas_is_the_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))

    def worker(world: World) -> None:
        for apart in (world.rank, 0):
            model = Quadratic()
            replica = offbeat.replicate(model, offbeat.local_sgd(every=9), mesh=world)
            with torch.no_grad():
                model.vector.add_(apart)
            replica.step()
            replica.finish()
            replica.detach()

    ThreadWorld(2).run(worker)
    assert all(recording.distance > 0.5 for recording in read_run(tmp_path))


@pytest.mark.parametrize("every", [1, 3])
def test_a_recorded_step_has_its_own_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Also where its loss is not reported, and after the data of a rank has ended."""
    monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))

    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, weighted=True)
        batches = [4.0 + k for k in range(5 + 2 * world.rank)]
        for step, batch in enumerate(replica.uneven(batches)):
            replica.set_weight(batch)
            value = loss(model, world.rank, step)
            value.backward()
            if step % every == 0:
                replica.report_loss(value)
            replica.step()
        replica.detach()

    ThreadWorld(2).run(worker)
    weights = [[step.weight for step in recording.steps] for recording in read_run(tmp_path)]
    assert weights == [[4, 5, 6, 7, 8, 0, 0], [4, 5, 6, 7, 8, 9, 10]]


def test_a_step_of_two_replicas_is_one_and_goes_on_with_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a GAN, whose rounds a comparison must not count twice."""
    monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))

    def worker(world: World) -> None:
        models = [Quadratic(), Quadratic()]
        replicas = [offbeat.replicate(model, offbeat.sgp(), mesh=world) for model in models]
        for step in range(4):
            for model, replica in zip(models, replicas, strict=True):
                loss(model, world.rank, step).backward()
                if replica is replicas[-1]:
                    replica.report_loss(step)
                replica.step()
        replicas.pop(0).detach()
        for _ in range(2):
            replicas[0].step()
        replicas[0].detach()

    ThreadWorld(2).run(worker)
    for recording in read_run(tmp_path):
        sent = [step.bytes_sent["world"] for step in recording.steps]
        assert sent[1:] == 3 * [2 * (MODEL_BYTES + 16)] + 2 * [MODEL_BYTES + 16]
        assert [step.loss for step in recording.steps] == [0, 1, 2, 3, None, None]
        both = recording.steps[0].spans_of("backward")
        assert [start >= 0 for start, _ in both] == [True, True]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_consensus_distance_is_the_distance_to_the_average(size: int) -> None:
    def worker(world: World) -> tuple[np.ndarray, dict[str, float], dict[str, float]]:
        model = torch.nn.Linear(100, 200)
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        equal = replica.consensus_distance()
        torch.manual_seed(world.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += (1 + world.rank) * torch.randn_like(parameter)
        apart = replica.consensus_distance()
        replica.detach()
        parts = [
            parameter.detach().double().numpy().reshape(-1) for parameter in model.parameters()
        ]
        return np.concatenate(parts), equal, apart

    models, equal, apart = zip(*ThreadWorld(size).run(worker), strict=True)
    distances = np.linalg.norm(np.array(models) - np.mean(models, axis=0), axis=1)
    assert equal[0] == {"mean": 0.0, "max": 0.0}
    # The sketch has a standard error of 1.1 %; four of them.
    assert apart[0]["mean"] == pytest.approx(distances.mean(), rel=0.045)
    assert apart[0]["max"] == pytest.approx(distances.max(), rel=0.045)


def test_writers(tmp_path: Path) -> None:
    stats = {"step": 3, "last": {"bytes_sent": 5}, "total": {"bytes_sent": 9}}
    stats["measures"] = {"orthogonality": 0.75}
    with offbeat.JsonLines(tmp_path / "deep" / "run.jsonl") as write:
        write(stats, loss=0.5)
        write(stats)
    lines = (tmp_path / "deep" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{**stats, "loss": 0.5}, stats]

    board = offbeat.TensorBoard(tmp_path / "board")
    board(stats, loss=0.5)
    board.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    tags = {"last/bytes_sent", "total/bytes_sent", "measures/orthogonality", "run/loss"}
    assert set(events.Tags()["scalars"]) == tags
    assert events.Scalars("total/bytes_sent")[0].value == 9


def test_a_recording_may_go_into_a_pipe() -> None:
    reader, writer = os.pipe()
    with offbeat.JsonLines(f"/dev/fd/{writer}") as write:
        write({"step": 1})
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert lines.read() == '{"step": 1}\n'


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """By a kill in the middle of it; the next process goes on in the same file."""
    path = tmp_path / "rank0.jsonl"
    for rank in range(2):
        with offbeat.JsonLines(path) as write:
            write(
                {"event": "attached", "nodes": [[0, 1]], "algorithm": "ddp()"},
                rank=rank,
                exchanges="",
            )
        if rank == 0:
            path.write_bytes(path.read_bytes() + b'{"event": "st')
    recording = Recording(path)
    with pytest.warns(RuntimeWarning, match="rank0.jsonl: a line was cut off"):
        recording.update()
    assert (recording.replicas, recording.rank) == (2, 1)


@pytest.mark.parametrize("where", ["a full disk", "a folder that cannot be made"])
@pytest.mark.fault(
    "a recording cannot be written (disk full, no permission)",
    "one RuntimeWarning; training goes on",
)
def test_a_recording_that_cannot_be_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "a full disk":
        (tmp_path / "rank1.jsonl").symlink_to("/dev/full")
        monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path / "file" / "folder"))
    with pytest.warns(RuntimeWarning, match="recording") as seen:
        done = stats_of("ddp", 2, steps=3)
    assert [stats["step"] for stats in done] == [3, 3]
    assert len(seen) == (1 if where == "a full disk" else 2)  # on one rank, or on both
