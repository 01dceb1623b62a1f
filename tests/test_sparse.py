"""Every recipe trains an embedding with sparse gradients as one with dense gradients."""

import numpy as np
import pytest
from torch.optim import SGD

from offbeat.testing import simulate
from problems import START, Lookup, flat, lookup_gradient, lookup_loss
from recipe_cases import CASES, Case

LR, STEPS = 0.1, 20


@pytest.mark.parametrize(
    "case", [c for c in CASES if "partition" not in c.text], ids=lambda case: case.text
)
def test_follows_the_reference(case: Case) -> None:
    """With momentum, whose sparse form is the dense one: rows that are not read decay too."""
    nodes = case.nodes(3)
    runs = simulate(
        case.algorithm,
        Lookup,
        lookup_loss,
        steps=STEPS,
        nodes=nodes,
        optimizer=lambda parameters: SGD(parameters, lr=LR, momentum=0.9),
    )
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    assert not case.agrees or (ours == ours[:, :1]).all()
    if (reference := case.of_rows or case.reference) is None:
        assert np.isfinite(ours).all()
        return
    theirs = reference(START, lookup_gradient, nodes=nodes, steps=STEPS, lr=LR, momentum=0.9)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=case.tolerance)
