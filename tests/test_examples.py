"""The examples run as their first lines say, and what they train on is what it should be."""

from pathlib import Path

import pytest
import torch

from ranks import torchrun_forked

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    return digits


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("char_gpt.py", "--steps 4 --report-every 2 --sample 20 --algorithm sgp"),
        ("digits_cnn.py", "--steps 4 --train-size 600 --algorithm local_sgd(every=2)"),
        ("lstm_text.py", "--steps 4 --accumulate 2 --width 64 --algorithm ddp(wire='bf16')"),
        ("segmentation.py", "--steps 12 --train-size 64 --algorithm daso(every=4,total_steps=12)"),
        ("skipgram.py", "--steps 40 --exchange-every 10 --words 20000 --workers 2"),
    ],
)
def test_an_example_trains_with_two_workers(script: str, options: str, tmp_path: Path) -> None:
    output = torchrun_forked(2, EXAMPLES / script, *options.split(), logs=tmp_path)
    assert "held-out" in output


def test_generated_digits_are_the_same_every_time_and_differ_by_label(digits: object) -> None:
    images, labels = digits.generated(300, seed=3)  # type: ignore[attr-defined]
    again, _ = digits.generated(300, seed=3)  # type: ignore[attr-defined]
    assert images.shape == (300, 1, 28, 28)
    assert torch.equal(images, again)
    assert set(labels.tolist()) == set(range(10))
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)])
    assert torch.pdist(means.flatten(1)).min() > 1.0


def test_generated_shapes_are_the_same_every_time_and_all_kinds_can_be_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import segmentation

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


def test_mnist_files_are_read(digits: object, tmp_path: Path) -> None:
    for part, count in (("train", 3), ("t10k", 2)):
        header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        pixels = bytes([255] * (count * 784))
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        header = bytes([0, 0, 8, 1]) + count.to_bytes(4, "big")
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(range(count)))
    (images, labels), (held, _) = digits.mnist(tmp_path)  # type: ignore[attr-defined]
    assert images.shape == (3, 1, 28, 28)
    assert images.min() == 1.0
    assert labels.tolist() == [0, 1, 2]
    assert len(held) == 2


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_stay_short(path: Path) -> None:
    assert path.read_text().count("\n") <= (120 if not path.stem.startswith("demo") else 200)
