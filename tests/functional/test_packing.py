"""Flat messages: nothing lost, nothing twice, whatever the shapes."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.functional import Layout, pack, runs_within

examples = settings(max_examples=60)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Tensor]:
    """Named tensors of any shape, 0-dim and empty ones too, in several dtypes and strides."""
    shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
    kinds = st.tuples(shapes, st.sampled_from(DTYPES), st.booleans())
    tensors = {}
    for index, (shape, dtype, turned) in enumerate(draw(st.lists(kinds, min_size=1, max_size=8))):
        # Whole numbers below 2048 are exact in all four dtypes.
        values = torch.arange(prod(shape)).view(shape) + 7 * index
        tensor = values.to(dtype)
        tensors[f"t{index}"] = (
            tensor.permute(tuple(range(tensor.dim()))[::-1]) if turned else tensor
        )
    return tensors


slices_and_chunks = st.tuples(st.integers(1, 5), st.integers(0, 7))


@examples
@given(tensors=models(), cut=slices_and_chunks)
def test_a_round_trip_changes_nothing(tensors: dict[str, Tensor], cut: tuple[int, int]) -> None:
    slices, chunks = cut
    layout = Layout.of(tensors, slices)
    flat = layout.empty("cpu", chunks)
    views = layout.views(flat)
    assert list(views) == list(tensors)
    pack(views.values(), tensors.values())
    back = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    pack(back.values(), layout.views(flat).values())
    for name, tensor in tensors.items():
        assert views[name].dtype == tensor.dtype
        assert views[name].shape == tensor.shape
        assert torch.equal(back[name], tensor), name


@examples
@given(tensors=models(), cut=slices_and_chunks)
def test_sections_are_whole_slices_with_room_for_all_chunks(
    tensors: dict[str, Tensor], cut: tuple[int, int]
) -> None:
    slices, chunks = cut
    layout = Layout.of(tensors, slices)
    flat = layout.empty("cpu", chunks)
    assert len(set(layout.dtypes)) == len(layout.dtypes) == len(layout.numels) == len(flat)
    for dtype, numel, section in zip(layout.dtypes, layout.numels, flat, strict=True):
        used = sum(t.numel() for t in tensors.values() if t.dtype == dtype)
        assert used <= numel < used + slices, "less than one element a slice is lost"
        assert numel % slices == 0
        assert section.dtype == dtype
        assert section.is_contiguous()
        assert section.numel() == numel // slices * max(slices, chunks)


@examples
@given(tensors=models(), cut=slices_and_chunks)
def test_views_do_not_overlap_and_lie_in_the_sent_part(
    tensors: dict[str, Tensor], cut: tuple[int, int]
) -> None:
    """Count in every element how many views have it."""
    slices, chunks = cut
    layout = Layout.of(tensors, slices)
    flat = layout.empty("cpu", chunks)
    for view in layout.views(flat).values():
        view.add_(1)
    for numel, section in zip(layout.numels, flat, strict=True):
        assert section.max() <= 1 if section.numel() else True
        assert section[numel:].sum() == 0, "room for other ranks' slices holds nothing"
    written = sum(int(section.sum(dtype=torch.float64)) for section in flat)
    assert written == sum(t.numel() for t in tensors.values())


@examples
@given(tensors=models(), slices=st.integers(1, 4))
def test_ranks_that_hold_the_same_tensors_lay_them_out_alike(
    tensors: dict[str, Tensor], slices: int
) -> None:
    others = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    assert Layout.of(tensors, slices) == Layout.of(others, slices)


def test_packing_casts_on_the_way() -> None:
    into = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64)]
    pack(into, [torch.tensor([1.0, 2.5, 1 + 2**-12]), torch.tensor([3, 4])])
    assert into[0].tolist() == [1.0, 2.5, 1.0]
    assert into[1].tolist() == [3.0, 4.0]


def test_packing_writes_through_to_strided_tensors() -> None:
    base = torch.zeros(3, 2)
    pack([base.t()], [torch.arange(6.0).view(2, 3)])
    assert base.t().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_packing_nothing() -> None:
    """As for the buffers of a model that has none."""
    pack([], [])


@pytest.mark.parametrize("lengths", [(1, 2), (2, 1), (0, 1)])
def test_packing_pairs_that_do_not_match_is_an_error(lengths: tuple[int, int]) -> None:
    into, tensors = ([torch.zeros(1)] * n for n in lengths)
    with pytest.raises((ValueError, RuntimeError)):
        pack(into, tensors)


sizes = st.lists(st.integers(0, 9) | st.integers(0, 50), max_size=40)


@examples
@given(sizes=sizes, first=st.integers(1, 20), more=st.integers(0, 20))
def test_partition_covers_everything_in_order_and_within_capacity(
    sizes: list[int], first: int, more: int
) -> None:
    capacity = first + more
    runs = runs_within(sizes, capacity, first)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert all(len(run) > 0 for run in runs)
    for number, run in enumerate(runs):
        held = sum(sizes[i] for i in run)
        allowed = capacity if number else first
        assert held <= allowed or sum(sizes[i] > 0 for i in run) == 1, "one larger item at most"
        if number + 1 < len(runs):
            following = sizes[runs[number + 1][0]]
            assert held + following > allowed, "a message leaves only when it is full"


def test_partition_at_the_edges() -> None:
    assert runs_within([], 4, 4) == []
    assert runs_within([9], 4, 2) == [range(0, 1)]
    assert runs_within([2, 2, 2, 2], 4, 2) == [range(0, 1), range(1, 3), range(3, 4)]
    assert runs_within([0, 0, 0], 4, 2) == [range(0, 3)]
