"""Words of the source code of Python's standard library, and batches for skip-gram."""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

WINDOW, NEGATIVES = 4, 5


def read_words(limit: int) -> tuple[Tensor, int]:
    """Return the text as word indices, and the size of the vocabulary."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts)
    words: list[str] = []
    for file in files:
        words += re.findall(r"[A-Za-z_]+", file.read_text("utf-8", errors="ignore").lower())
        if len(words) > limit:
            break
    common = {w: i for i, (w, n) in enumerate(Counter(words).most_common()) if n >= 5}
    return torch.tensor([common[w] for w in words if w in common]), len(common)


def batch(text: Tensor, size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return centres (n,), and contexts (n, 1 + NEGATIVES): a neighbour, then negative samples."""
    at = torch.randint(WINDOW, len(text) - WINDOW, (size,), generator=random)
    offset = torch.randint(1, WINDOW + 1, (size,), generator=random)
    side = 2 * torch.randint(2, (size,), generator=random) - 1
    drawn = text[torch.randint(len(text), (size, NEGATIVES), generator=random)]
    return text[at], torch.cat([text[at + side * offset][:, None], drawn], 1)
