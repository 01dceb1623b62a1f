"""Adam on the coordinates that a gradient touches (Renda, Asynchronous Adam, section 3)."""

from math import sqrt

from torch import Tensor, iinfo


def adam_step_size(lr: float, betas: tuple[float, float], t: int) -> float:
    r"""Return the bias-corrected step size of update ``t``, counted from 1.

    .. math:: \alpha_t = \alpha \sqrt{1 - \beta_2^t} / (1 - \beta_1^t)

    The printed Algorithm 1 can draw t = 0, which is 0/0; here t starts at 1.

    >>> round(adam_step_size(0.1, (0.9, 0.999), 1), 6)  # 0.1 sqrt(1 - 0.999) / (1 - 0.9)
    0.031623
    """
    return lr * sqrt(1.0 - betas[1] ** t) / (1.0 - betas[0] ** t)


def touched(gradient: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return indices and values of the coordinates with g != 0 of a dense or sparse gradient.

    Duplicates in a sparse gradient are added up first.

    >>> import torch
    >>> touched(torch.tensor([0.0, 2.0]))
    ((tensor([1]),), tensor([2.]))
    """
    if not gradient.is_sparse:
        where = gradient.nonzero(as_tuple=True)
        return where, gradient[where]
    gradient = gradient.coalesce()
    within = gradient.values().nonzero(as_tuple=True)
    return (*gradient.indices()[:, within[0]], *within[1:]), gradient.values()[within]


def masked_adam(
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    *,
    alpha: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    counts: Tensor | None = None,
) -> None:
    r"""Update the coordinates with a non-zero gradient, in place.

    .. math::
        \forall g_j \ne 0:\quad
        m_j &\leftarrow \beta_1 m_j + (1 - \beta_1) g_j \\
        v_j &\leftarrow \beta_2 v_j + (1 - \beta_2) g_j^2 \\
        \theta_j &\leftarrow (1 - d)\,\theta_j - \alpha_t\, m_j / (\sqrt{v_j} + \epsilon)

    ``decay`` d is the learning rate times the weight decay. Nothing is written to coordinates
    with g = 0, so that a worker never undoes what another wrote there. ``theta``, ``m`` and ``v``
    have one shape, ``gradient`` has it too and is dense or sparse; all have one dtype, in which
    this computes. With ``counts``, integers of that shape, ``alpha`` is not corrected yet: each
    touched coordinate counts its updates, :math:`n_j \leftarrow n_j + 1`, and takes
    :func:`adam_step_size` at :math:`t = n_j`. One pass over the gradient, several over the touched
    coordinates; ``offbeat.hogwild.AsyncAdam`` has the compiled form.

    Source: Renda, Asynchronous Adam, Algorithms 1 and 2; eps is added to the root, as in
    ``torch.optim.SparseAdam``.

    >>> import torch
    >>> theta, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> g = torch.tensor([0.0, 2.0])
    >>> masked_adam(theta, m, v, g, alpha=0.1, betas=(0.9, 0.75), eps=0.0, decay=0.5)
    >>> theta, m, v
    (tensor([1.0000, 0.4800]), tensor([0.0000, 0.2000]), tensor([0., 1.]))
    """
    if not theta.dim():  # a number has no coordinates
        theta, m, v, gradient = (tensor.view(1) for tensor in (theta, m, v, gradient))
        counts = None if counts is None else counts.view(1)
    where, g = touched(gradient)
    first = m[where].mul_(betas[0]).add_(g, alpha=1.0 - betas[0])
    second = v[where].mul_(betas[1]).addcmul_(g, g, value=1.0 - betas[1])
    m[where], v[where] = first, second
    kept = theta[where].mul_(1.0 - decay)
    if counts is not None:
        updates = counts[where]
        updates += updates < iinfo(counts.dtype).max
        counts[where] = updates
        n = updates.double()  # a power in 16 bits would stay at 1
        first = first.mul(((1.0 - betas[1] ** n).sqrt() / (1.0 - betas[0] ** n)).to(first.dtype))
    theta[where] = kept.addcdiv_(first, second.sqrt().add_(eps), value=-alpha)
