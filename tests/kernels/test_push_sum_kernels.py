"""The compiled push-sum passes agree with those in torch."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.functional.push_sum import Messages
from offbeat.kernels import push_sum
from offbeat.kernels.dispatch import push_sum_passes
from offbeat.kernels.pieces import IN_TORCH, PushSumPasses

WIRES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
]
FAST = PushSumPasses(push_sum.fill_messages, push_sum.add_messages, push_sum.fill_and_add)
SLOW = IN_TORCH
wires = pytest.mark.parametrize(("dtype", "wire"), WIRES)


def exchanged(
    way: PushSumPasses, z: Tensor, anchor: Tensor, message: Tensor, receivers: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One exchange in which what is sent comes back to the sender."""
    z, anchor, out = z.clone(), anchor.clone(), torch.zeros_like(message)
    sent: Messages = [(0.5 / receivers, receivers, out)]
    layers = z.split([len(z) // 3, len(z) - len(z) // 3])
    assert way.fill_messages(layers, anchor, 0.75, sent)
    way.add_messages(layers, anchor, 0.625, sent, [message])
    return z, anchor, out


@wires
@given(
    numel=st.one_of(st.integers(0, 200), st.integers(0, 4 * push_sum.CHUNK)),
    receivers=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_both_ways_agree(
    dtype: torch.dtype, wire: torch.dtype, numel: int, receivers: int, seed: int
) -> None:
    torch.manual_seed(seed)
    z, anchor = (10 ** torch.randn(numel).to(dtype) for _ in range(2))
    message = torch.randn(numel).to(wire)
    fast = exchanged(FAST, z, anchor, message, receivers)
    slow = exchanged(SLOW, z, anchor, message, receivers)
    for ours, torchs in zip(fast, slow, strict=True):
        # A multiplication may be fused with the addition after it in one and not in the other,
        # and a cast to 16 bits may round such a difference up.
        torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("way", [FAST, SLOW], ids=["numba", "torch"])
@wires
@given(
    numel=st.integers(0, 200),
    receivers=st.integers(1, 3),
    weights=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)),
    seed=st.integers(0, 2**16),
)
def test_both_passes_at_once_are_the_two_bit_for_bit(
    way: PushSumPasses,
    dtype: torch.dtype,
    wire: torch.dtype,
    numel: int,
    receivers: int,
    weights: tuple[float, float],
    seed: int,
) -> None:
    """Which of them is made depends on the clock."""
    torch.manual_seed(seed)
    start = tuple((10 ** torch.randn(numel)).to(dtype) for _ in range(2))
    arrived = torch.randn(numel).to(wire)
    ends = []
    for at_once in (True, False):
        z, anchor = (tensor.clone() for tensor in start)
        out = torch.zeros(numel, dtype=wire)
        sent: Messages = [(1 / (1 + receivers), receivers, out)]
        if at_once:
            assert way.fill_and_add([z], anchor, *weights, sent, [arrived])
        else:
            way.fill_messages([z], anchor, weights[0], sent)
            way.add_messages([z], anchor, weights[1], sent, [arrived])
        ends.append((z, anchor, out))
    for one, two in zip(*ends, strict=True):
        assert torch.equal(one, two)


@given(numel=st.integers(1, 200), receivers=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_the_error_of_the_cast_stays_with_the_sender(numel: int, receivers: int, seed: int) -> None:
    torch.manual_seed(seed)
    z, anchor = torch.randn(numel), torch.randn(numel)
    x = z.double() - 0.25 * anchor.double()
    out = torch.zeros(numel, dtype=torch.bfloat16)
    push_sum.fill_messages([z], anchor, 0.75, [(1 / (1 + receivers), receivers, out)])
    assert out.double().sub(x / (1 + receivers)).abs().max() <= 2**-8 * x.abs().max()
    torch.testing.assert_close(anchor.double() + receivers * out.double(), x, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_stays_so_in_16_bits() -> None:
    numbers = [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, 0.0, -0.0, 1.00390625]
    z = torch.tensor(numbers)
    anchor, arrived = torch.zeros(8), z.bfloat16()
    push_sum.add_messages([z], anchor, 1.0, [], [arrived])
    assert torch.equal(z[2:], arrived.float()[2:])
    assert torch.equal(z.isnan(), arrived.isnan())


def test_other_dtypes_and_several_messages_are_left_to_torch() -> None:
    z, anchor = torch.full((3,), 3.0, dtype=torch.bfloat16), torch.full((3,), 2.0)
    messages = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(2)]
    push_sum.fill_messages([z], anchor, 0.5, [(0.25, 1, messages[0]), (0.5, 1, messages[1])])
    assert [float(message[0]) for message in messages] == [0.5, 1.0]
    push_sum.add_messages([z], anchor, 0.5, [], messages)
    assert float(z[0]) == (0.5 + 0.5 + 1.0) / 0.5
    plain = torch.tensor([3.0])
    sent, arrived = torch.tensor([1.5]), torch.tensor([4.5])
    push_sum.add_messages([plain], None, 1.0, [(0.5, 1, sent)], [arrived])
    assert plain.item() == 6.0


def test_it_is_chosen_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_sum, "fill_messages", print)
    assert push_sum_passes(torch.device("cpu")).fill_messages is print


def test_a_cast_to_bfloat16_is_that_of_torch() -> None:
    """Every value halfway between two neighbours, and random ones."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    halfway = (bits.float().view(torch.int32) + 2**15).view(torch.float32)
    z = torch.cat([bits.float(), halfway, torch.randn(1000)])
    z, out = z[z.isfinite()], torch.zeros(int(z.isfinite().sum()), dtype=torch.bfloat16)
    assert push_sum.fill_messages([z], torch.zeros_like(z), 1.0, [(1.0, 1, out)])
    assert torch.equal(out, z.bfloat16())


@pytest.mark.parametrize("way", [FAST, SLOW], ids=["numba", "torch"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("dtype", "wire"), [*WIRES, (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize("has_anchor", [True, False])
def test_parameters_that_are_not_finite_are_not_sent(
    way: PushSumPasses, bad: float, dtype: torch.dtype, wire: torch.dtype, has_anchor: bool
) -> None:
    layers = [torch.ones(5, dtype=dtype), torch.ones(3 * push_sum.CHUNK, dtype=dtype)]
    numel = sum(map(len, layers))
    anchor = torch.ones(numel, dtype=torch.float32 if wire != torch.float64 else wire)
    for layer, place in ((1, -1), (1, 0), (0, 2)):
        layers[layer][place] = bad
        out, arrived = (torch.zeros(numel, dtype=wire) for _ in range(2))
        sent: Messages = [(0.5, 1, out)]
        assert not way.fill_messages(layers, anchor if has_anchor else None, 1.0, sent)
        assert not way.fill_and_add(
            layers, anchor if has_anchor else None, 1.0, 1.0, sent, [arrived]
        )
        assert out.isfinite().all()
        layers[layer][place] = 1.0


LOADED = """
import torch
from offbeat.kernels import push_sum
from offbeat.kernels.dispatch import load_kernels

load_kernels(torch.device("cpu"))
for kernel in push_sum._fill, push_sum._add, push_sum._fill_and_add:
    kernel.disable_compile()  # then numba raises where it would
for wire in torch.float32, torch.bfloat16:
    z, message = torch.ones(5), torch.ones(5, dtype=wire)
    sent = [(0.5, 1, message)]
    assert push_sum.fill_messages([z], z.clone(), 0.5, sent)
    push_sum.add_messages([z], z.clone(), 0.5, sent, [message])
    assert push_sum.fill_and_add([z], z.clone(), 0.5, 0.5, sent, [message.clone()])
"""


def test_kernels_that_are_loaded_compile_nothing_in_an_exchange() -> None:
    """Not in the first one after a switch, for which others wait: that takes seconds."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
