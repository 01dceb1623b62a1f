"""What the kernels of a GPU can show on one only: no races, and one launch for all layers.

Their results are compared in ``tests/kernels``, on a GPU where there is one.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from offbeat.functional import Segment, top_k
from offbeat.kernels.dispatch import adasum_passes, machine_code, push_sum_passes, top_k_of_blocks

pytest.importorskip("triton", reason="needs Triton, which PyTorch for CUDA installs")
DEVICE, NUMEL, AGAIN = torch.device("cuda"), 10_000_000, 10


@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_the_same_entries_are_selected_in_every_run(kind: str) -> None:
    x = torch.randn(NUMEL, device=DEVICE) if kind == "normal" else torch.ones(NUMEL, device=DEVICE)
    blocks = [(0, NUMEL // 3, 1000), (NUMEL // 3, NUMEL, NUMEL // 100)]
    select = top_k_of_blocks(DEVICE)
    first = select(x, blocks)
    for _ in range(AGAIN):
        assert torch.equal(select(x, blocks), first)
    for (start, stop, k), found in zip(blocks, first.split([1000, NUMEL // 100]), strict=True):
        assert len(found.unique()) == k
        theirs = x[start:stop][top_k(x[start:stop], k)].abs()
        assert torch.equal(x[found].abs().sort().values, theirs.sort().values)


def test_inner_products_are_the_same_in_every_run() -> None:
    rows, spans = torch.randn(4, NUMEL, device=DEVICE), [Segment(0, 0, NUMEL)]
    passes = adasum_passes(DEVICE, machine_code(DEVICE) != "")
    found = []
    for _ in range(AGAIN):
        out = torch.zeros(1, 4, 4, dtype=torch.float64, device=DEVICE)
        passes.add_gram(rows, spans, out)
        found.append(out)
    assert all(torch.equal(out, found[0]) for out in found)
    torch.testing.assert_close(found[0][0], rows.double() @ rows.double().T)


def test_push_sum_takes_one_launch_for_all_layers() -> None:
    zs = [torch.randn(1000 + i, device=DEVICE) for i in range(50)]
    anchor, out = (torch.randn(sum(map(len, zs)), device=DEVICE) for _ in range(2))
    fill = push_sum_passes(DEVICE).fill_messages
    fill(zs, anchor, 0.5, [(0.5, 1, out)])  # compiles, and copies the table of addresses
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        fill(zs, anchor, 0.5, [(0.5, 1, out)])
        torch.cuda.synchronize()
    kernels = [event for event in found.events() if "_fill" in event.name]
    assert len(kernels) == 1


def test_an_address_that_is_used_again_is_read_again() -> None:
    """Tables of addresses are kept from launch to launch."""
    fill = push_sum_passes(DEVICE).fill_messages
    for value in (1.0, 2.0, 3.0):
        z, out = torch.full((5000,), value, device=DEVICE), torch.zeros(5000, device=DEVICE)
        fill([z], None, 1.0, [(0.5, 1, out)])
        assert torch.equal(out, 0.5 * z)
        del z
