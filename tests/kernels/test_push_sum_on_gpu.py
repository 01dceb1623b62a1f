"""The push-sum passes of a GPU agree with those in torch, for all layers in one launch."""

import pytest
import torch
from torch import Tensor

from offbeat.functional.push_sum import Messages
from offbeat.kernels.pieces import IN_TORCH, PushSumPasses
from triton_device import DEVICE, kernels_of

push_sum = kernels_of("push_sum")

ON_GPU = PushSumPasses(push_sum.fill_messages, push_sum.add_messages, push_sum.fill_and_add)
LAYERS = {"odd": (3000, 1, 0, 2048, 7), "even": (2048, 768, 4096 + 8)}
KINDS = [  # parameters, messages
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]
every_kind = pytest.mark.parametrize(("dtype", "wire"), KINDS)


def drawn(dtype: torch.dtype, layers: str) -> tuple[list[Tensor], Tensor]:
    """Layers that lie apart, and an anchor whose rounding they were before a small step."""
    zs, parts = [], []
    for numel in LAYERS[layers]:
        anchor = torch.randn(numel)
        zs.append((anchor.to(dtype) + 0.1 * torch.randn(numel)).to(dtype).to(DEVICE))
        parts.append(anchor)
    return zs, torch.cat(parts).to(DEVICE)


def exchanged(
    way: PushSumPasses, zs: list[Tensor], anchor: Tensor | None, wire: torch.dtype
) -> list[Tensor]:
    """One exchange in which a message like that of another rank arrives; all that it writes."""
    zs, anchor = [z.clone() for z in zs], None if anchor is None else anchor.clone()
    numel = sum(z.numel() for z in zs)
    out = torch.full((numel,), 9.0, dtype=wire, device=DEVICE)
    arrived = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(DEVICE, wire)
    sent: Messages = [(0.25, 2, out)]
    before, after = (1.0, 1.0) if anchor is None else (0.75, 0.625)
    way.fill_messages(zs, anchor, before, sent)
    way.add_messages(zs, anchor, after, sent, [arrived])
    return [*zs, out, *([] if anchor is None else [anchor])]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("has_anchor", [True, False])
@every_kind
def test_both_ways_agree(
    dtype: torch.dtype, wire: torch.dtype, has_anchor: bool, layers: str
) -> None:
    zs, anchor = drawn(dtype, layers)
    ours = exchanged(ON_GPU, zs, anchor if has_anchor else None, wire)
    torchs = exchanged(IN_TORCH, zs, anchor if has_anchor else None, wire)
    # torch fuses a product and a sum on some processors: a cast may round that difference up.
    eps = max(torch.finfo(dtype).eps, torch.finfo(wire).eps)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=4 * eps, atol=4 * eps)


@every_kind
def test_the_error_of_the_cast_stays_with_the_sender(dtype: torch.dtype, wire: torch.dtype) -> None:
    zs, anchor = drawn(dtype, "odd")
    z = torch.cat(zs).double()
    x = 0.75 * anchor.double() + (z - anchor.to(dtype).double())
    out = torch.zeros_like(anchor, dtype=wire)
    push_sum.fill_messages(zs, anchor, 0.75, [(0.25, 3, out)])
    error = out.double() - 0.25 * x
    assert error.abs().max() <= 2 * torch.finfo(wire).eps * x.abs().max()
    torch.testing.assert_close(anchor.double() + 3 * out.double(), x, rtol=1e-5, atol=1e-6)


def test_a_cast_to_bfloat16_is_that_of_torch() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    halfway = (bits.float().view(torch.int32) + 2**15).view(torch.float32)
    z = torch.cat([bits.float(), halfway])
    z = z[(z.abs() >= torch.finfo(torch.bfloat16).tiny) & z.isfinite()].to(DEVICE)
    out = torch.zeros_like(z, dtype=torch.bfloat16)
    assert push_sum.fill_messages([z], None, 1.0, [(1.0, 1, out)])
    assert torch.equal(out, z.bfloat16())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_parameters_that_are_not_finite_are_not_sent(bad: float) -> None:
    zs, anchor = drawn(torch.float32, "odd")
    zs[-1][-1] = bad
    out, arrived = torch.zeros_like(anchor), torch.zeros_like(anchor)
    assert not push_sum.fill_messages(zs, anchor, 1.0, [(0.5, 1, out)])
    assert not push_sum.fill_and_add(zs, anchor, 1.0, 1.0, [(0.5, 1, out)], [arrived])
    assert not out.any()


def test_what_does_not_fit_is_left_to_torch() -> None:
    zs, anchor = drawn(torch.float32, "odd")
    outs = [torch.zeros_like(anchor) for _ in range(2)]
    push_sum.fill_messages(zs, anchor, 1.0, [(0.25, 1, outs[0]), (0.5, 1, outs[1])])
    torch.testing.assert_close(outs[1], 0.5 * torch.cat(zs))
    wide = [z.double() for z in zs]
    push_sum.add_messages(wide, anchor.double(), 1.0, [], [out.double() for out in outs])
    torch.testing.assert_close(torch.cat(wide), torch.cat(zs).double(), rtol=1e-6, atol=1e-6)
