"""Sparse messages: what they hold, what they leave, and values that are not finite."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.functional import Segment, SparseFormat, add_sparse, chunks_of, fill_sparse
from offbeat.functional.messages.sparse_messages import CHUNK
from offbeat.kernels.dispatch import top_k_of_blocks

Bits = Literal[2, 4, 8] | None
BITS: tuple[Bits, ...] = (None, 2, 4, 8)


def exchanged(acc: Tensor, chunks: list[tuple[int, int, int]], bits: Bits) -> Tensor:
    """What a message of ``acc`` holds, which leaves it."""
    form = SparseFormat(chunks, bits, acc.dtype, acc.device)
    message = torch.full((form.nbytes,), 255, dtype=torch.uint8)  # memory is used again
    fill_sparse(acc, form, message, top_k_of_blocks(acc.device))
    return add_sparse(message, form, torch.zeros_like(acc))


@given(
    sizes=st.lists(st.integers(1, 300) | st.just(2 * CHUNK + 7), min_size=1, max_size=4),
    density=st.floats(0.001, 1),
    bits=st.sampled_from(BITS),
    zeros=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_the_largest_entries_travel_and_nothing_is_lost(
    sizes: list[int], density: float, bits: Bits, zeros: float, seed: int
) -> None:
    torch.manual_seed(seed)
    given = torch.randn(sum(sizes), dtype=torch.float64) * 10 ** torch.randn(sum(sizes))
    given[torch.rand(sum(sizes)) < zeros] = 0
    ends = torch.tensor(sizes).cumsum(0).tolist()
    segments = [
        Segment(i, end - n, end) for i, (n, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    chunks = chunks_of(segments, density)
    sent = exchanged(left := given.clone(), chunks, bits)
    torch.testing.assert_close(sent + left, given, rtol=0, atol=1e-12 * given.abs().max().item())
    for start, stop, k in chunks:
        whole, part = given[start:stop].abs(), sent[start:stop]
        expected = whole.topk(k).values
        assert part.count_nonzero() == expected.count_nonzero()  # zeros are not sent
        if bits is None:
            assert torch.equal(part.abs().topk(k).values, expected)
        elif expected.any():
            taken = expected[expected > 0]
            width = (taken.max() - taken.min()) / 2 ** (bits - 1)
            error = (part - given[start:stop])[part != 0].abs().max()
            assert error <= width / 2 + 1e-6 * taken.max()
            assert ((part * given[start:stop]) >= 0).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_travels(bits: Bits, value: float) -> None:
    acc = torch.randn(CHUNK + 100)
    acc[17] = value
    sent = exchanged(acc, chunks_of([Segment(0, 0, len(acc))], 0.01), bits)
    assert not sent.isfinite().all()
    assert sent[CHUNK:].isfinite().all()


@pytest.mark.parametrize("bits", BITS)
def test_every_index_of_a_chunk_can_be_named(bits: Bits) -> None:
    acc = torch.arange(1.0, CHUNK + 1)
    sent = exchanged(acc, [(0, CHUNK, CHUNK)], bits)
    assert sent.count_nonzero() == CHUNK


def test_bytes() -> None:
    """12 bits for an index, ``bits`` for a value, and 8 bytes of scales for a chunk."""
    chunks = chunks_of([Segment(0, 0, 100 * CHUNK)], 1 / 64)
    for bits, entry in ((2, 1.75), (4, 2.0), (8, 2.5)):
        form = SparseFormat(chunks, bits, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        assert form.nbytes == 100 * (64 * entry + 8)
    form = SparseFormat(chunks, None, torch.float64, torch.device("cpu"))
    assert form.nbytes == 100 * 64 * 9.5
