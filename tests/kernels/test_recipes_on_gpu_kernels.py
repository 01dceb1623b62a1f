"""Recipes that train with the kernels of a GPU follow their references."""

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

import offbeat
import problems
from offbeat.kernels import dispatch
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient
from recipe_cases import CASES, Case
from triton_device import DEVICE, kernels_of

launch = kernels_of("launch")
LR, STEPS = 0.1, 8
KERNELS = {  # which kernels each recipe needs
    "sgp": {"_check", "_fill", "_add"},
    "sgp(overlap=1, wire='bf16')": {"_check", "_fill", "_add"},
    "sgp('ring', overlap=2)": {"_check", "_fill"},
    "sgp(overlap=2, within='local')": {"_check", "_fill", "_add"},
    "adasum(every=3, method='gram')": {"_products", "_sums", "_combine"},
    "adasum(method='gram', within='local')": {"_products", "_sums", "_combine"},
    "adasum(partition=True)": {"_products", "_sums", "_combine"},
    "lags(density=0.2)": {"_maxima", "_bound", "_digits", "_descend", "_tally", "_place"},
    "slgs(density=0.25)": {"_maxima", "_bound", "_digits", "_descend", "_tally", "_place"},
    "diloco(every=3, lr=1.0, momentum=0.5, wire='bf16')": {"_cast"},
    "diloco(every=3, delay=1, mixing=0.25, lr=1.0, momentum=0.5, within='local', wire='int8')": {
        "_quantize"
    },
}
BY_TEXT = {case.text: case for case in CASES}
every_recipe = pytest.mark.parametrize(
    "case", [BY_TEXT[text] for text in KERNELS], ids=lambda case: case.text
)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Choose the kernels wherever tensors are, and count their launches."""
    found: Counter[str] = Counter()
    one_at_a_time = threading.Lock()  # the interpreter has one grid for all threads

    def counted(kernel: Any, programs: Any, rows: torch.Tensor, *args: Any) -> None:
        with one_at_a_time:
            found[kernel.__name__] += 1
            original(kernel, programs, rows, *args)

    original = launch.launch
    for name in ("push_sum", "adasum", "top_k", "narrowing"):
        monkeypatch.setattr(kernels_of(name), "launch", counted)
    monkeypatch.setattr(dispatch, "_has_numba", lambda: False)
    monkeypatch.setattr(dispatch, "_has_triton", lambda device: device.type == DEVICE)
    monkeypatch.setattr(dispatch, "SMALL", 0)
    for user in ("operands", "rvhdd"):
        name = f"offbeat.methods.adasum.{user}.machine_code"
        monkeypatch.setattr(name, lambda device: "the same on all ranks")
    monkeypatch.setattr(problems, "DEVICE", DEVICE)
    return found


@every_recipe
def test_follows_the_reference(case: Case, launches: Counter[str]) -> None:
    nodes = case.nodes(4)

    def worker(world: World) -> list[Any]:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
        course = [flat(snapshot(model))]
        for _ in range(STEPS):
            model(world.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            course.append(flat(snapshot(model)))
        replica.detach()
        return course

    ours = np.array(ThreadWorld(nodes=nodes).run(worker)).swapaxes(0, 1)
    assert case.reference is not None
    theirs = case.reference(START, gradient, nodes=nodes, steps=STEPS, lr=LR, momentum=0.9)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=max(case.tolerance, 1e-5))
    # Gloo's messages lie on the host: what fills them, or reads what has arrived, runs there.
    if DEVICE == "cpu" or case.text.startswith(("lags", "slgs")):
        assert KERNELS[case.text] <= set(launches)
