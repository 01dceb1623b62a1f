"""Whole training steps on an accelerator that does not exist: what must hold on all that do.

Every recipe trains there, in one process, since a device is registered for good.
"""

import time
from queue import Empty

import numpy as np
import pytest
from on_stand_in import LARGE, LR, STEPS, Run, nodes_of, train_all, train_large
from stand_in import MIXED

from problems import START, gradient
from ranks import fork_server
from recipe_cases import CASES, Case, of_each_recipe

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# Where the host waits for the accelerator in a backward or a step, and why. Messages leave from the
# accelerator. A place that is not here is a fault: it stops the host from running ahead.
WAITS = {
    ("functional/finite:all_finite", "aten._local_scalar_dense.default"): (
        "parameters that are not finite raise before an exchange: they must not reach another rank"
    ),
    ("exchange/engine/call_number:CallNumber.write", "synchronize"): (
        "for an event of the last backward, long over: its number must be read before the next"
    ),
    ("methods/mean:BoundMean._spread_nonfinite", "aten.copy_.default"): (
        "partition=True: all ranks of a node must decide alike whether to step"
    ),
    ("methods/top_k/dense:DenseMessage.wait", "aten._local_scalar_dense.default"): (
        "residuals are kept or restored by whether any rank's gradient is finite"
    ),
    ("exchange/engine/message:FlatMessage.read_flags", "tolist"): (
        "the same, and which layers any rank has used"
    ),
    ("methods/adasum/operands:Operands.redo", "tolist"): (
        "which layers cancel, and need more messages"
    ),
    ("methods/adasum/reduction:Statistics.is_finite", "tolist"): (
        "an update that is not finite raises before any parameter changes"
    ),
    ("methods/outer/fragment:Fragment._fault_of_mean", "aten._local_scalar_dense.default"): (
        "the same, once in H steps"
    ),
    ("methods/push_sum/gossip:GossipRound.wait", "aten._local_scalar_dense.default"): (
        "a message of another step must raise"
    ),
    (
        "methods/push_sum/gossip:GossipRound.weight_arrived.<locals>.<genexpr>",
        "aten._local_scalar_dense.default",
    ): "weights are numbers of the host, in float64; they have arrived with the number of the step",
    ("functional/packing:pack", "aten._foreach_copy_.default"): (
        "ad_psgd: its messages go through the host, on a thread of their own"
    ),
}
# Gloo sends from the host: there messages are filled and read.
COPIES = {
    ("functional/packing:pack", "aten._foreach_copy_.default"),
    ("platform/device:wait_for_stream", "synchronize"),  # once for all gradients of a bucket
    ("exchange/engine/dot_grad:put", "aten.copy_.default"),
    ("exchange/engine/message:FlatMessage.write_flags", "aten.copy_.default"),
    ("methods/top_k/payload:Payload.put", "aten.copy_.default"),
    ("methods/top_k/payload:Payload.read", "aten.copy_.default"),
    ("methods/top_k/sparse:SparseMessage._spread", "aten.copy_.default"),
    ("methods/top_k/sparse:SparseMessage.launch", "aten.copy_.default"),
    ("methods/adasum/adasum_update:BoundAdasum._broadcast_shares", "aten._to_copy.default"),
    ("methods/adasum/adasum_update:BoundAdasum._broadcast_shares", "aten.copy_.default"),
    ("methods/stale_average/rotation:_as_memory", "aten.copy_.default"),
}
THROUGH_HOST = [
    "ddp(wire='bf16')",
    "lags(density=0.2)",
    "lags(density=0.2, wire='bf16')",
    "adasum(method='gram', within='local')",
    "adasum(partition=True)",
    "sgp(overlap=1)",
    "diloco(every=3)",
    "daso(every=2)",
    "ad_psgd",
]
TRAINED = [case for case in CASES if case in of_each_recipe(CASES) or case.text in THROUGH_HOST]


def runs(texts: list[str], *, sends: bool) -> dict[str, Run]:
    """Train in a process of its own; the runs by text."""
    server = fork_server()
    results = server.Queue()
    process = server.Process(target=train_all, args=(results, texts, sends))
    process.start()
    found: dict[str, Run] = {}
    deadline = time.monotonic() + 250
    while len(found) <= len(texts) + 1 and time.monotonic() < deadline:
        try:
            text, run = results.get(timeout=1)
            found[text] = run
        except Empty:
            if not process.is_alive():
                break
    process.kill()
    process.join()
    return found


@pytest.fixture(scope="module")
def sent() -> dict[str, Run]:
    return runs([case.text for case in TRAINED], sends=True)


def test_the_device_notes_what_an_accelerator_waits_for(sent: dict[str, Run]) -> None:
    run = sent[""]
    assert not run.error, run.error
    assert run.course == [3.0] * 3
    assert run.waits == {
        ("the script", "aten._local_scalar_dense.default"): 1,
        ("the script", "aten.nonzero.default"): 1,
        ("the script", "aten.index.Tensor"): 1,
        ("the script", "aten._to_copy.default"): 1,
        ("the script", "aten.copy_.default"): 1,
        ("the script", MIXED): 1,
        ("the script", "tolist"): 1,
        ("the script", "numpy"): 1,
        ("the script", "synchronize"): 1,
        ("platform/device:wait_for_stream", "synchronize"): 1,
    }


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.text)
def test_steps_make_no_host_wait_but_where_listed(case: Case, sent: dict[str, Run]) -> None:
    assert case.text in sent, "the process has ended before"
    run = sent[case.text]
    assert not run.error, run.error
    hidden = {wait: count for wait, count in in_offbeat(run).items() if wait not in WAITS}
    assert not hidden
    check_course(case, run)


def test_selection_in_large_layers_makes_no_host_wait(sent: dict[str, Run]) -> None:
    """Through maxima of blocks, in 16 bits, with two learning rates, as on the host."""
    run = sent[LARGE]
    assert not run.error, run.error
    assert not {wait for wait in in_offbeat(run) if wait not in WAITS}
    np.testing.assert_allclose(run.course, train_large("cpu"), rtol=0, atol=1e-6)


def test_every_wait_that_is_listed_exists(sent: dict[str, Run]) -> None:
    assert set(WAITS) <= {wait for run in sent.values() for wait in run.waits}


def test_messages_through_the_host_are_copied_there_only() -> None:
    found = runs(THROUGH_HOST, sends=False)
    np.testing.assert_allclose(found[LARGE].course, train_large("cpu"), rtol=0, atol=1e-6)
    assert list(found) == ["", LARGE, *[case.text for case in CASES if case.text in THROUGH_HOST]]
    for case in CASES:
        if case.text in found:
            run = found[case.text]
            assert not run.error, run.error
            hidden = {w: n for w, n in in_offbeat(run).items() if w not in COPIES | set(WAITS)}
            assert not hidden, case.text
            check_course(case, run)


def in_offbeat(run: Run) -> dict[tuple[str, str], int]:
    """Without those of the script itself."""
    return {wait: count for wait, count in run.waits.items() if ":" in wait[0]}


def check_course(case: Case, run: Run) -> None:
    """All parameters after every step equal those of the reference."""
    if case.reference is not None:
        nodes = nodes_of(case)
        theirs = case.reference(START, gradient, nodes=nodes, steps=STEPS, lr=LR, momentum=0.9)
        np.testing.assert_allclose(run.course, theirs, rtol=0, atol=case.tolerance)
