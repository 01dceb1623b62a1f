"""Rounding to 16 bits: bfloat16, or float16 with a power of two as scale."""

from typing import Literal

import torch
from torch import Tensor

Sixteen = Literal["bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROOM = 14  # scaled fp16 values stay below 2^14, two bits away from overflow


def fitting_scales(largest: Tensor) -> Tensor:
    """Return powers of two that scale the ``largest`` absolute values to just below 2^14.

    >>> fitting_scales(torch.tensor([1.0, 3.0, 0.0])).tolist()
    [8192.0, 4096.0, 1.0]
    """
    exponent = torch.frexp(largest.double()).exponent
    # A range that covers the smallest float32 numbers, in which no inverse overflows.
    scale = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), ROOM - exponent)
    known = (largest > 0) & largest.isfinite()
    return torch.where(known, scale.clamp(2.0**-100, 2.0**100), torch.ones_like(scale))


def round_to_16_bits(x: Tensor, wire: Sixteen) -> tuple[Tensor, Tensor]:
    r"""Return ``x`` (n,) rounded to 16 bits and the scale s (), of which x is about m / s.

    .. math:: m = round(s\, x), \qquad s = 2^{\lfloor 14 - \log_2 \max |x| \rfloor}

    with "fp16", and s = 1 with "bf16". The scale is float64, on the device of ``x``. Values more
    than 2^38 times smaller than the largest become 0 in float16.

    >>> round_to_16_bits(torch.tensor([1.0, 1 + 2**-10, 1e6]), "bf16")
    (tensor([1.0000e+00, 1.0000e+00, 9.9942e+05], dtype=torch.bfloat16), tensor(1., dtype=...))
    >>> round_to_16_bits(torch.tensor([1.0, 1 + 2**-10, 1e6]), "fp16")[1].item()
    0.015625
    """
    if wire == "bf16":
        return x.bfloat16(), torch.ones((), dtype=torch.float64, device=x.device)
    scale = fitting_scales(x.abs().amax())
    return (x * scale.to(x.dtype)).half(), scale
