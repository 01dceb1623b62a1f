"""Images of digits: generated from fonts, scikit-learn's scans, or local MNIST files."""

import gzip
import struct
from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

Images = tuple[Tensor, Tensor]  # (n, 1, 28, 28) in 0..1, and (n,) labels
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "cmr10")


def generated(count: int, seed: int) -> Images:
    """Generate digits in six fonts under random affine maps, with Gaussian noise.

    Deterministic for a given seed. 60,000 images take about ten seconds.
    """
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    fonts = torch.randint(len(FONTS), (count,), generator=random)
    glyphs = torch.stack([glyph(digit, font) for digit in range(10) for font in range(len(FONTS))])
    images = glyphs[labels * len(FONTS) + fonts]
    parts = images.split(2000)
    moved = torch.cat([move(part, random) for part in parts])
    noise = 0.15 * torch.randn(moved.shape, generator=random)
    return (moved + noise).clamp(0, 1), labels


def move(images: Tensor, random: torch.Generator) -> Tensor:
    """Apply an independent random affine map to each image."""
    turn, shear = (0.25 * torch.randn(2, len(images), generator=random)).unbind()
    scale = 1.1 + 0.3 * torch.rand(len(images), generator=random)
    shift = 0.2 * torch.rand(len(images), 2, generator=random) - 0.1
    rows = [
        torch.stack([turn.cos(), shear - turn.sin(), shift[:, 0]], 1),
        torch.stack([turn.sin(), turn.cos(), shift[:, 1]], 1),
    ]
    maps = (
        torch.stack(rows, 1) * torch.stack([scale, scale, scale.new_ones(len(scale))], 1)[:, None]
    )
    grid = affine_grid(maps, list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)


@lru_cache
def glyph(digit: int, font: int) -> Tensor:
    """Rasterize one digit of one font to (1, 28, 28)."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    file = FontProperties(fname=str(folder / f"{FONTS[font]}.ttf"))
    path = TextPath((0, 0), str(digit), size=10, prop=file)
    box = path.get_extents()
    ticks = (np.arange(56) - 27.5) / 20  # two samples per pixel and axis
    size = max(box.width, box.height)
    x = box.x0 + box.width / 2 + ticks * size / 2
    y = box.y0 + box.height / 2 - ticks * size / 2
    points = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)
    # TextPath does not mark holes: apply the even-odd rule to its polygons.
    polygons = path.to_polygons(closed_only=True)
    inside = sum(matplotlib.path.Path(polygon).contains_points(points) for polygon in polygons)
    pixels = (np.asarray(inside) % 2).reshape(28, 2, 28, 2).mean((1, 3))
    return torch.tensor(pixels, dtype=torch.float32)[None]


def small() -> tuple[Images, Images]:
    """Load scikit-learn's 1,797 scans, resized from 8 x 8; every fifth is held out."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    images = torch.nn.functional.interpolate(images, (28, 28), mode="bilinear")
    held = torch.arange(len(images)) % 5 == 4
    target = torch.tensor(labels)
    return (images[~held], target[~held]), (images[held], target[held])


def mnist(folder: Path) -> tuple[Images, Images]:
    """Load the four IDX files of MNIST, plain or gzipped."""
    parts = [(idx(folder, f"{p}-images-idx3-ubyte"), idx(folder, f"{p}-labels-idx1-ubyte"))
             for p in ("train", "t10k")]  # fmt: skip
    train, test = [
        (torch.tensor(x)[:, None].float() / 255, torch.tensor(y).long()) for x, y in parts
    ]
    return train, test


def idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """Read an IDX file: two zero bytes, type, number of dimensions, sizes, data."""
    plain = folder / name
    raw = (
        plain.read_bytes() if plain.exists() else gzip.decompress(Path(f"{plain}.gz").read_bytes())
    )
    dimensions = raw[3]
    shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
