"""The examples and demos run, and generate the data that they describe."""

import importlib
import json
import threading
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from typer.testing import CliRunner

from ranks import torchrun_forked

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def digits(example: Any) -> ModuleType:
    return example("digits")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("char_gpt.py", "--steps 4 --report-every 2 --sample 20 --algorithm lags(density=0.05)"),
        ("digits_cnn.py", "--steps 4 --train-size 600 --algorithm local_sgd(every=2)"),
        ("lstm_text.py", "--steps 4 --accumulate 2 --width 64 --algorithm ddp(wire='bf16')"),
        ("segmentation.py", "--steps 12 --train-size 64 --algorithm daso(every=4,total_steps=12)"),
        ("recommender.py", "--steps 4 --users 500 --items 100 --algorithm ddp(wire='bf16')"),
        ("skipgram.py", "--steps 40 --exchange-every 10 --words 20000 --workers 1"),
    ],
)
def test_an_example_trains_with_two_workers(script: str, options: str, tmp_path: Path) -> None:
    output = torchrun_forked(2, EXAMPLES / script, *options.split(), logs=tmp_path)
    assert "held-out" in output


@pytest.mark.processes
def test_the_example_of_sharding_trains_on_two_nodes(tmp_path: Path) -> None:
    options = ("--steps", "4", "--report-every", "2", "--width", "32", "--shards", "2")
    output = torchrun_forked(4, EXAMPLES / "sharded_gpt.py", *options, logs=tmp_path)
    assert "held-out" in output


@pytest.mark.processes
def test_the_demo_falls_back_to_loopback_and_writes_its_results(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the demo sets it; restored afterwards
    demo = example("demo")
    open_runner = demo.open_runner
    monkeypatch.setattr(
        demo, "open_runner", lambda nodes, ranks, _: open_runner(nodes, ranks, None)
    )
    options = ["--nodes=2", "--steps=4", "--algorithms=daso(every=2, total_steps={steps})"]
    result = CliRunner().invoke(demo.app, [*options, f"--out={tmp_path}"])
    assert result.exit_code == 0, result.output
    assert "loopback" in result.output
    (row,) = json.loads((tmp_path / "demo.json").read_text())
    assert row["method"] == "daso(every=2, total_steps=4)"
    assert row["seconds_to_baseline"] == pytest.approx(row["seconds"])
    assert 1 < row["heldout_loss"] < 5
    for name in ("loss.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert json.loads((tmp_path / "compare.json").read_text())["results"]


def test_the_demo_takes_methods_that_do_not_train_in_threads(example: Any) -> None:
    example("demo").compile_kernels(["torch_ddp", "daso(every=2, total_steps={steps})"])


def test_the_demo_rejects_an_unknown_recipe(example: Any, tmp_path: Path) -> None:
    result = CliRunner().invoke(example("demo").app, ["--algorithms=dpd", f"--out={tmp_path}"])
    assert result.exit_code == 2
    assert "unknown algorithm 'dpd'" in result.output


def test_the_hogwild_demo_trains_with_one_thread_and_with_two(example: Any, tmp_path: Path) -> None:
    options = ["--rows=3000", "--features=500", "--nonzeros=20", "--passes=5", "--lr=0.01"]
    result = CliRunner().invoke(example("demo_hogwild").app, [*options, f"--out={tmp_path}"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    one, two = json.loads((tmp_path / "demo.json").read_text())["runs"]
    for run_ in (one, two):
        assert len(run_["seconds"]) == len(run_["loss"]) == 5
        assert run_["seconds"] == sorted(run_["seconds"])
        assert run_["loss"][-1] < run_["loss"][0]


def test_a_run_that_ends_before_it_is_watched_is_reported(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Over(threading.Thread):
        def start(self) -> None:
            super().start()
            self.join()

    workers, reports = example("demo_workers"), list[int]()
    monkeypatch.setattr(workers.threading, "Thread", Over)
    rows = example("sparse_rows").generate(200, 50, 5)
    run = workers.fit(*rows, 1, 3, 0.01, lambda done, seconds, loss: reports.append(done))
    assert len(run.seconds) == len(run.loss) == reports[-1] == 3


@pytest.mark.parametrize("options", [["--workers=0"], ["--workers=two"], ["--rows=1"]])
def test_the_hogwild_demo_rejects_invalid_options(example: Any, options: list[str]) -> None:
    assert CliRunner().invoke(example("demo_hogwild").app, options).exit_code == 2


@pytest.mark.parametrize(
    ("place", "ends"),
    [
        ("beside", (9, 8, 5, 5, 4)),
        ("below", (10, 10, 10, 10, 10)),
        ("beside", (9.9, 3, 2.9, 2.8, 1)),
    ],
)
def test_labels_of_the_picture_do_not_overlap(
    example: Any, tmp_path: Path, place: str, ends: tuple[float, ...]
) -> None:
    picture = example("demo_picture")
    lines = [
        picture.Line(f"method  {number}.23", "black", [0, end / 2, end], [4, 2.5, 2 + number / 50])
        for number, end in enumerate(ends)
    ]
    with picture.figure("Title", 2, tmp_path / "picture.png") as figure:
        picture.limit(figure.axes[0], lines, skip=0.1)
        for axes in figure.axes:
            picture.panel(axes, lines, getattr(picture, place))
        figure.draw_without_rendering()
        for axes in figure.axes:
            boxes = [Text.get_window_extent(text) for text in axes.texts]  # without arrows
            assert len(boxes) == len(lines)
            assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
            assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
            assert all(box.y0 > axes.bbox.y0 for box in boxes)


def test_times_are_interpolated_between_evaluations(example: Any) -> None:
    table, point = example("demo_table"), example("demo_table").Point
    curve = [point(0, 0.0, 4.0), point(10, 2.0, 3.0), point(20, 4.0, 2.0)]
    assert table.seconds_to(curve, 2.5) == 3.0
    assert table.seconds_to(curve, 1.0) is None


def test_generated_digits_are_the_same_every_time_and_differ_by_label(digits: ModuleType) -> None:
    images, labels = digits.generated(300, seed=3)
    again, _ = digits.generated(300, seed=3)
    assert images.shape == (300, 1, 28, 28)
    assert torch.equal(images, again)
    assert set(labels.tolist()) == set(range(10))
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)])
    assert torch.pdist(means.flatten(1)).min() > 1.0


def test_generated_shapes_are_the_same_every_time_and_all_kinds_can_be_told_apart(
    example: Any,
) -> None:
    segmentation = example("segmentation")
    images, target = segmentation.pictures(40, seed=3)
    again, _ = segmentation.pictures(40, seed=3)
    assert torch.equal(images, again)
    shares = target.flatten().bincount() / target.numel()
    assert len(shares) == segmentation.CLASSES
    assert shares.min() > 0.1

    class Knows(torch.nn.Module):
        def __init__(self, missed: int) -> None:
            super().__init__()
            self.missed = missed  # a class that it takes for the background

        def forward(self, _: torch.Tensor) -> torch.Tensor:
            found = torch.where(target == self.missed, 0, target)
            return torch.nn.functional.one_hot(found, 4).movedim(-1, 1).float()

    background = shares[0] / (shares[0] + shares[3])
    for missed, iou in ((-1, 1.0), (3, (2 + background.item()) / 4)):
        _, found = segmentation.evaluate(Knows(missed), images, target)
        assert found == pytest.approx(iou)


def test_mnist_files_are_read(digits: ModuleType, tmp_path: Path) -> None:
    for part, count in (("train", 3), ("t10k", 2)):
        header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        pixels = bytes([255] * (count * 784))
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        header = bytes([0, 0, 8, 1]) + count.to_bytes(4, "big")
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(range(count)))
    (images, labels), (held, _) = digits.mnist(tmp_path)
    assert images.shape == (3, 1, 28, 28)
    assert images.min() == 1.0
    assert labels.tolist() == [0, 1, 2]
    assert len(held) == 2


def test_examples_stay_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        lines = path.read_text().count("\n")
        assert lines <= (120 if not path.stem.startswith("demo") else 200), path.stem
