"""The narrow messages of a GPU are those of torch, bit for bit, and so are the errors."""

import pytest
import torch
from torch import Tensor

from offbeat.functional.messages.narrowing import GROUP, Narrow, narrow, narrow_bytes, widen
from triton_device import DEVICE, kernels_of

on_gpu = kernels_of("narrowing")
# The interpreter divides with NumPy, which warns of 0 / 0.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
every_wire = pytest.mark.parametrize("wire", ["bf16", "int8"])


def both(acc: Tensor, wire: Narrow) -> list[tuple[Tensor, Tensor]]:
    """Errors and messages of the kernel and of torch."""
    found = []
    for way in (on_gpu.narrow, narrow):
        error = acc.to(DEVICE, copy=True)
        message = torch.zeros(narrow_bytes(acc.numel(), wire), dtype=torch.uint8, device=DEVICE)
        way(error, message, wire)
        found.append((error, message))
    return found


@every_wire
@pytest.mark.parametrize("groups", [1, 7, 8, 33])
def test_both_ways_are_equal(wire: Narrow, groups: int) -> None:
    acc = 10 ** torch.randn(groups * GROUP) * torch.randn(groups * GROUP)
    acc[: GROUP // 2] *= 0
    (ours, message), (error, theirs) = both(acc, wire)
    assert torch.equal(message, theirs)
    assert torch.equal(ours, error)
    sent = widen(message, torch.empty_like(ours), wire)
    torch.testing.assert_close(sent.double() + ours.double(), acc.double().to(DEVICE))


def test_zeros_and_halves_are_rounded_to_even() -> None:
    acc = torch.zeros(2 * GROUP)
    acc[:8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    (_, message), _ = both(acc, "int8")
    values = widen(message, torch.empty(2 * GROUP, device=DEVICE), "int8")
    assert values[:8].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 126.0]
    assert not values[8:].any()


@every_wire
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(wire: Narrow, value: float) -> None:
    acc = torch.ones(2 * GROUP)
    acc[3] = value
    (_, message), _ = both(acc, wire)
    values = widen(message, torch.empty(2 * GROUP, device=DEVICE), wire)
    assert not values[3].isfinite()
    assert values[GROUP:].isfinite().all()


@every_wire
def test_other_dtypes_are_left_to_torch(wire: Narrow) -> None:
    (ours, message), (error, theirs) = both(torch.randn(GROUP, dtype=torch.float64), wire)
    assert torch.equal(message, theirs)
    assert torch.equal(ours, error)
