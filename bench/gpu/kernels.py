"""Kernels on a GPU reach 80 % of the bandwidth of a copy; top-k takes a tenth of torch.topk."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from statistics import median

import torch
from torch import Tensor

from bench.gpu.device import device_of, uncached
from bench.gpu.gpt2 import GPT2, SMALL, Shape
from bench.harness import Bench, Result, at_least, command
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
BENCH = Bench(name="gpu/kernels", minutes=1, full_minutes=4, gpu=True)
Work = Callable[[], object]
# A name, elements, bytes of one that must be read and written, a kernel, and the same in torch.
Pass = tuple[str, int, float, Work, Work]


def passes(shape: Shape, large: int, device: torch.device) -> Iterator[Pass]:
    """Over the layers of a model, and in one large layer."""
    layers = [p.numel() for p in GPT2(shape, torch.device("meta")).parameters()]
    numel = sum(layers)
    a, b = (torch.randn(numel, device=device) for _ in range(2))
    copy = partial(b.copy_, a)
    yield COPY, numel, 8, copy, copy
    yield from push_sum(layers, b)
    yield from narrowing(numel, b)
    yield from adasum(layers, device)
    blocks = [(*span, count_kept(span[1] - span[0], DENSITIES[0])) for span in spans_of(layers)]
    yield "top-k of all layers", numel, 4, *selection(a, blocks)
    x = torch.randn(large, device=device)
    for density in DENSITIES:
        block = 0, large, count_kept(large, density)
        yield f"{TOPK}, {density:g}", large, 4, *selection(x, [block])


def spans_of(layers: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(layers, initial=0)))


def push_sum(layers: list[int], anchor: Tensor) -> Iterator[Pass]:
    """Layers that lie apart, and messages of 16 bits."""
    zs = [torch.randn(numel, device=anchor.device) for numel in layers]
    out, arrived = (torch.zeros_like(anchor, dtype=torch.bfloat16) for _ in range(2))
    ways, sent = (push_sum_passes(anchor.device), IN_TORCH), [(0.5, 1, out)]
    # Reads z, to send nothing that is not finite, then z and the anchor, writes the anchor and 16
    # bits; reads the anchor and 16 bits, writes z and the anchor.
    fill = [partial(way.fill_messages, zs, anchor, 0.75, sent) for way in ways]
    add = [partial(way.add_messages, zs, anchor, 1.0, sent, [arrived]) for way in ways]
    yield "push-sum, fill messages", len(anchor), 18, *fill
    yield "push-sum, add messages", len(anchor), 14, *add


def narrowing(numel: int, like: Tensor) -> Iterator[Pass]:
    """Casts with error feedback."""
    acc = like[: numel // 256 * 256].clone()
    for wire, nbytes in (("bf16", 10.0), ("int8", 9 + 1 / 64)):
        message = acc.new_zeros(narrow_bytes(len(acc), wire), dtype=torch.uint8)
        both = (partial(way, acc, message, wire) for way in (narrowing_on(acc.device), narrow))
        yield f"cast to {wire} with its error", len(acc), nbytes, *both


def adasum(layers: list[int], device: torch.device) -> Iterator[Pass]:
    """Inner products of the vectors of some ranks, and their combination."""
    rows = torch.randn(RANKS, sum(layers), device=device)
    spans = Segments(Segment(layer, *span) for layer, span in enumerate(spans_of(layers)))
    products = torch.zeros(len(layers), RANKS, RANKS, dtype=torch.float64, device=device)
    weights, out = products[:, 0] + 0.5, torch.empty_like(rows[0])
    ways = adasum_passes(device, machine_code(device) != ""), functional
    products_of = [partial(way.add_gram, rows, spans, products) for way in ways]
    combine = [partial(way.combine_rows, rows, spans, weights, out) for way in ways]
    yield f"Adasum, inner products of {RANKS}", len(out), 4 * RANKS, *products_of
    yield f"Adasum, combination of {RANKS}", len(out), 4 * RANKS + 4, *combine


def selection(x: Tensor, blocks: list[tuple[int, int, int]]) -> tuple[Work, Work]:
    """The largest entries of every block; in torch by one call for each."""

    def one_by_one() -> list[Tensor]:
        return [x[start:stop].abs().topk(k, sorted=False).indices for start, stop, k in blocks]

    return partial(top_k_of_blocks(x.device), x, blocks), one_by_one


@command(BENCH, "--full", full="Ten times the rounds.")
def app(full: bool = False) -> Result:
    """Measure all kernels on the layers of GPT-2 small, and top-k in 10 million elements."""
    device = device_of(BENCH)
    return measure(SMALL, LARGE, 200 if full else 20, device, torch.cuda.get_device_name(device))


def measure(shape: Shape, large: int, rounds: int, device: torch.device, name: str) -> Result:
    """Time all passes one after the other, of which the first is the copy."""
    found, rows, claims, copy = [], [], [], None
    for text, numel, nbytes, *both in passes(shape, large, device):
        kernel, plain = (uncached(work, rounds, device) for work in both)
        found.append({"name": text, "numel": numel, "nbytes": nbytes})
        found[-1] |= {"kernel": kernel, "torch": plain}
        rate, faster = numel * nbytes / median(kernel), median(plain) / median(kernel)
        copy = copy or rate
        times = (f"{median(seconds) * 1e3:.3f} ms" for seconds in (plain, kernel))
        share = f"{rate / 1e9:.0f}", f"{rate / copy:.0%}"
        rows.append((text, f"{nbytes:.3g}", *times, f"{faster:.1f} x", *share))
        if text.startswith(TOPK):
            claims.append(at_least(f"{text}: faster than torch.topk", faster, 10, "{:.1f} x"))
        elif text != COPY:
            claims.append(at_least(f"{text}: bandwidth of a copy", rate / copy, 0.8, "{:.0%}"))
    millions = f"{found[0]['numel'] / 1e6:.0f} million"
    title = f"Passes over {millions} elements, {name}, medians of {rounds}"
    return Result(title, HEADINGS, rows, claims, {"gpu": name, "passes": found})
