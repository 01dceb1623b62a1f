"""SGD against torch.optim.SGD: the only file here that imports torch."""

import numpy as np
import pytest
import torch

from reference.sgd import SGD


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), SGD(0.1, 0.9), SGD(0.1, 0.9, 0.01), SGD(0.1, 0.9, 0.01, True)]
)
def test_sgd_is_torch_sgd(optimizer: SGD) -> None:
    """To rounding, over eight steps, with and without each setting."""
    params = np.random.default_rng(0).normal(size=(3, 4))
    velocity = np.zeros_like(params)
    theirs = torch.nn.Parameter(torch.from_numpy(params.copy()))
    torch_sgd = torch.optim.SGD([theirs], **vars(optimizer))
    for k in range(8):
        grads = np.sin(params * (k + 1))
        theirs.grad = torch.from_numpy(grads)
        torch_sgd.step()
        params, velocity = optimizer.step(params, grads, velocity)
        np.testing.assert_allclose(params, theirs.detach().numpy(), rtol=1e-13, atol=1e-14)
