"""Bandwidth of each kernel on a GPU beside a copy of the device, torch's passes and torch.topk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from statistics import median

import torch
from rich.progress import track
from torch import Tensor

from bench.gpu.device import device_of, uncached
from bench.gpu.gpt2 import GPT2, SMALL, Shape
from bench.harness import Bench, Claim, Result, command, console
from offbeat import functional
from offbeat.functional import Segment, Segments, count_kept
from offbeat.functional.messages.narrowing import narrow, narrow_bytes
from offbeat.kernels.dispatch import (
    adasum_passes,
    machine_code,
    narrowing_on,
    push_sum_passes,
    top_k_of_blocks,
)
from offbeat.kernels.pieces import IN_TORCH

RANKS = 4  # whose vectors Adasum combines
DENSITIES = (0.001, 0.01)
LARGE = 10_000_000
COPY, TOPK = "copy", "top-k of one layer"
HEADINGS = ("pass", "bytes per element", "torch", "kernel", "faster", "GB/s", "of a copy")
BENCH = Bench(
    name="gpu/kernels",
    claim="Kernels on a GPU reach 80 % of the bandwidth of a copy; top-k in a tenth of torch.topk",
    minutes=1,
    full_minutes=4,
    gpu=True,
)
Work = Callable[[], object]


@dataclass(frozen=True)
class Pass:
    """What is timed: a kernel, and the same in torch; what must be read and written."""

    name: str
    numel: int
    nbytes: float  # of an element
    kernel: Work
    torch: Work


@dataclass(frozen=True)
class Found:
    """Seconds of each round."""

    name: str
    numel: int
    nbytes: float
    kernel: list[float]
    torch: list[float]

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.numel * self.nbytes / median(self.kernel)

    @property
    def faster(self) -> float:
        """How many times as fast as torch the kernel is."""
        return median(self.torch) / median(self.kernel)


def passes(shape: Shape, large: int, device: torch.device) -> Iterator[Pass]:
    """Over the layers of a model, and in one large layer."""
    layers = [p.numel() for p in GPT2(shape, torch.device("meta")).parameters()]
    numel = sum(layers)
    a, b = (torch.randn(numel, device=device) for _ in range(2))
    yield Pass(COPY, numel, 8, lambda: b.copy_(a), lambda: b.copy_(a))
    yield from push_sum(layers, b)
    yield from narrowing(numel, b)
    yield from adasum(layers, device)
    yield from selection(layers, a)
    x = torch.randn(large, device=device)
    for density in DENSITIES:
        k = count_kept(large, density)
        name = f"{TOPK}, {density:g}"
        select = top_k_of_blocks(device)
        yield Pass(name, large, 4, partial(select, x, [(0, large, k)]), partial(full, x, k))


def full(x: Tensor, k: int) -> Tensor:
    """The straightforward selection."""
    return x.abs().topk(k, sorted=False).indices


def push_sum(layers: list[int], anchor: Tensor) -> Iterator[Pass]:
    """Layers that lie apart, and messages of 16 bits."""
    zs = [torch.randn(numel, device=anchor.device) for numel in layers]
    out, arrived = (torch.zeros_like(anchor, dtype=torch.bfloat16) for _ in range(2))
    ours = push_sum_passes(anchor.device)
    sent = [(0.5, 1, out)]
    # Reads z, to send nothing that is not finite, then z and the anchor, writes the anchor and 16
    # bits; reads the anchor and 16 bits, writes z and the anchor.
    fill, add = (
        [partial(way.fill_messages, zs, anchor, 0.75, sent) for way in (ours, IN_TORCH)],
        [partial(way.add_messages, zs, anchor, 1.0, sent, [arrived]) for way in (ours, IN_TORCH)],
    )
    yield Pass("push-sum, fill messages", len(anchor), 18, *fill)
    yield Pass("push-sum, add messages", len(anchor), 14, *add)


def narrowing(numel: int, like: Tensor) -> Iterator[Pass]:
    """Casts with error feedback."""
    acc = like[: numel // 256 * 256].clone()
    for wire, nbytes in (("bf16", 10.0), ("int8", 9 + 1 / 64)):
        message = acc.new_zeros(narrow_bytes(len(acc), wire), dtype=torch.uint8)
        both = (partial(way, acc, message, wire) for way in (narrowing_on(acc.device), narrow))
        yield Pass(f"cast to {wire} with its error", len(acc), nbytes, *both)


def adasum(layers: list[int], device: torch.device) -> Iterator[Pass]:
    """Inner products of the vectors of some ranks, and their combination."""
    rows = torch.randn(RANKS, sum(layers), device=device)
    ends = pairwise(accumulate(layers, initial=0))
    spans = Segments(Segment(layer, *end) for layer, end in enumerate(ends))
    products = torch.zeros(len(layers), RANKS, RANKS, dtype=torch.float64, device=device)
    weights, out = products[:, 0] + 0.5, torch.empty_like(rows[0])
    ours = adasum_passes(device, machine_code(device) != "")
    yield Pass(
        f"Adasum, inner products of {RANKS}", len(out), 4 * RANKS,
        partial(ours.add_gram, rows, spans, products),
        partial(functional.add_gram, rows, spans, products),
    )  # fmt: skip
    yield Pass(
        f"Adasum, combination of {RANKS}", len(out), 4 * RANKS + 4,
        partial(ours.combine_rows, rows, spans, weights, out),
        partial(functional.combine_rows, rows, spans, weights, out),
    )  # fmt: skip


def selection(layers: list[int], x: Tensor) -> Iterator[Pass]:
    """The largest entries of every layer; in torch by one call for each."""
    ends = list(pairwise(accumulate(layers, initial=0)))
    blocks = [(start, stop, count_kept(stop - start, DENSITIES[0])) for start, stop in ends]
    select = top_k_of_blocks(x.device)

    def one_by_one() -> list[Tensor]:
        return [full(x[start:stop], k) for start, stop, k in blocks]

    yield Pass("top-k of all layers", len(x), 4, partial(select, x, blocks), one_by_one)


def rows(found: list[Found]) -> list[tuple[str, ...]]:
    """Medians, and the bandwidth relative to that of the copy."""
    copy = found[0]
    lines = []
    for each in found:
        times = [f"{median(seconds) * 1e3:.3f} ms" for seconds in (each.torch, each.kernel)]
        rate = f"{each.rate / 1e9:.0f}", f"{each.rate / copy.rate:.0%}"
        lines.append((each.name, f"{each.nbytes:.3g}", *times, f"{each.faster:.1f} x", *rate))
    return lines


def claims(found: list[Found]) -> list[Claim]:
    """Of passes their bandwidth, of the selection in a large layer its time."""
    copy, made = found[0], []
    for each in found[1:]:
        if each.name.startswith(TOPK):
            text, goal = f"{each.name}: faster than torch.topk", "10 x"
            made.append(Claim(text, goal, f"{each.faster:.1f} x", each.faster >= 10))
        else:
            share = each.rate / copy.rate
            text, goal = f"{each.name}: bandwidth of a copy", "at least 80 %"
            made.append(Claim(text, goal, f"{share:.0%}", share >= 0.8))
    return made


@command(BENCH, "--full", full="Ten times the rounds.")
def app(full: bool = False) -> Result:
    """Measure all kernels on the layers of GPT-2 small, and top-k in 10 million elements."""
    device = device_of(BENCH)
    return measure(SMALL, LARGE, 200 if full else 20, device, torch.cuda.get_device_name(device))


def measure(shape: Shape, large: int, rounds: int, device: torch.device, name: str) -> Result:
    """Time all passes one after the other."""
    found = []
    works = passes(shape, large, device)
    for each in track(works, "", console=console, disable=not console.is_terminal):
        times = [uncached(work, rounds, device) for work in (each.kernel, each.torch)]
        found.append(Found(each.name, each.numel, each.nbytes, *times))
        console.print(f"{each.name}: {found[-1].rate / 1e9:.0f} GB/s", style="dim")
    title = f"Passes over {found[0].numel / 1e6:.0f} million elements, {name}, medians of {rounds}"
    measured = {"gpu": name, "passes": found}
    return Result(title, HEADINGS, rows(found), claims(found), measured)
