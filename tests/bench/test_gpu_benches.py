"""The benches of a GPU end without one, and judge by what they measure."""

import importlib
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from bench.gpu import steps
from bench.gpu.gpt2 import Shape
from bench.harness import page
from bench.harness.catalogue import benches
from bench.harness.environment import environment
from bench.harness.training import Times, alternate
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Kernels that take a second a call, and copies that take a third; torch takes as long."""
    from bench.gpu import kernels

    calls = count()

    def made_up(work: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
        work()
        return [1 / 3 if next(calls) < 2 else 1.0] * rounds

    monkeypatch.setattr(kernels, "uncached", made_up)
    return kernels


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["kernels", "steps"])
def test_without_a_gpu_a_bench_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(importlib.import_module(f"bench.gpu.{name}").app, [])
    assert done.exit_code == 2
    assert f"gpu/{name} needs a GPU" in done.output


def test_a_kernel_is_judged_by_the_bandwidth_of_a_copy(kernels: ModuleType) -> None:
    result = kernels.measure(Shape(16, 1, 2, 16, 64), 1000, 2, CPU, "none")
    assert [row[-1] for row in result.rows[:2]] == ["100%", f"{18 / 8 / 3:.0%}"]
    holding = [claim.text for claim in result.claims if claim.holds]
    # Only its 20 bytes an element, in the time of three copies of 8, make 80 % of their bandwidth.
    assert holding == ["Adasum, combination of 4: bandwidth of a copy"]
    assert sum("faster than torch.topk" in claim.text for claim in result.claims) == 2


@pytest.mark.usefixtures("world_of_one")
def test_all_methods_train_in_turns() -> None:
    found = alternate(steps.training(Shape(8, 1, 2, 8, 16), turns=1, device="cpu"))
    assert list(found) == ["alone", "torch DDP", *steps.METHODS]
    assert all(each.steps == [16, 8] and len(each.paces) == 1 for each in found.values())
    assert [row[0] for row in steps.rows(found)] == list(found)


def test_ddp_may_take_three_percent_longer() -> None:
    def times(*seconds: float) -> Times:
        return Times([1, 1, 1], [9.0, *seconds])

    found = {name: times(1.0, 1.0) for name in ("alone", "torch DDP", *steps.METHODS)}
    assert steps.claims(found | {"ddp()": times(1.03, 1.0)})[0].holds
    assert not steps.claims(found | {"ddp()": times(1.03, 1.05)})[0].holds


def test_only_a_bench_of_a_gpu_sees_one() -> None:
    assert environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in environment(gpu=True)
    assert {b.name for b in benches() if b.gpu} == {"gpu/kernels", "gpu/steps"}


def test_the_page_says_what_was_not_measured() -> None:
    block = "<!-- table: gpu/none -->\n\nold\n\n<!-- end -->"
    with pytest.raises(ValueError, match="run it first"):
        page.BLOCK.sub(page._block, block)
    found = re.sub("none", "steps", block)
    if not (ROOT / "bench/results/gpu/steps.json").exists():
        assert page.UNMEASURED in page.BLOCK.sub(page._block, found)
