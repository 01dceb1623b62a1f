"""Measurement of the assumption behind the convergence of LAGS-SGD."""

from offbeat.exchange.engine.dot_grad import stored
from offbeat.functional import count_kept, delta
from offbeat.methods.top_k.top_k import BoundTopK
from offbeat.transport.collectives import all_reduce
from offbeat.transport.group import message_device


def deltas(state: BoundTopK) -> dict[str, float]:
    r"""Measure the paper's :math:`\delta^{(l)}` of the last backward, for every sparse layer.

    .. math::
        \delta^{(l)} = \frac{\|\sum_p x^{p,(l)} - \sum_p TopK(x^{p,(l)}, k^{(l)})\|^2}
            {E \|\sum_p x^{p,(l)} - RandK(\sum_p x^{p,(l)}, k^{(l)})\|^2}

    ``state`` is ``replica.gradients`` under :func:`offbeat.lags`. All ranks call, between
    ``backward()`` and the next change of ``.grad``; layers without a gradient on any rank are left
    out. Sends 2 (n-1)/n of the model in float64: not for every step.

    Source: Shi et al. 2020, eq. 20; assumption 1 holds where it is at most 1.
    """
    found, group = {}, state.group
    for name, parameter in state.site.registered.items():
        grad, density = stored(parameter), state.plan.density_of(name)
        if grad is None or density == 1:
            continue
        residual = state.home[name].feedback["residual"].latest[name]
        left = residual.double().contiguous().view(-1).to(message_device(group, residual.device))
        all_reduce(left, group).wait()
        scale = state.units.scales[name]  # .grad is a mean: this rank's weight is in it
        sent = grad.double().mul(scale.rate / scale.loss * group.size)
        total = left + sent.contiguous().view(-1).to(left.device)
        found[name] = delta(total, left, count_kept(grad.numel(), density))
    return found
