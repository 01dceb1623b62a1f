"""The Adasum operator on two vectors, and on many through their inner products."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.functional.packing import Segment

Array = Any  # a tensor, or an array of NumPy's
BLOCK = 2**15  # elements of a row in float64 at a time: blocks of a few rows fit a cache
CANCELLATION = 1e-6  # a sum below this share of its parts' squared norm has lost half its digits


def adasum(a: Tensor, b: Tensor, leaves: tuple[int, int] = (1, 1)) -> Tensor:
    r"""Combine two vectors: to their sum if they are orthogonal, to their mean if parallel.

    .. math::
        AS(a, b) = \left(1 - \frac{n_a}{N} \frac{a \cdot b}{|a|^2}\right) a
        + \left(1 - \frac{n_b}{N} \frac{a \cdot b}{|b|^2}\right) b, \quad N = n_a + n_b

    ``leaves`` are :math:`n_a` and :math:`n_b`, the numbers of ranks whose vectors a and b already
    combine. Equal numbers give the paper's operator; with others, parallel vectors still combine
    to their mean. If one vector is zero, the result is the other. ``a``, ``b`` and the result have
    one shape and dtype. Dot products accumulate in float64 and only the result is rounded. Four
    passes; extra memory: two vectors in float64.

    Source: Maleki et al. 2021, equation 8; there :math:`n_a = n_b`.

    >>> adasum(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor([1.2500, 0.7500])
    """
    wide_a, wide_b = a.double(), b.double()
    ca, cb = pair_coefficients(_products(wide_a, wide_b), leaves[0] / sum(leaves))
    return (ca * wide_a + cb * wide_b).to(a.dtype)


def pair_coefficients(products: Tensor, share: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    r"""Compute the factors of a and b from :math:`a \cdot a, a \cdot b, b \cdot b`.

    ``products`` is (..., 3) in float64, ``share`` is :math:`n_a / N`, see :func:`adasum`.

    >>> pair_coefficients(torch.tensor([1.0, 1.0, 2.0]))
    (tensor(0.5000), tensor(0.7500))
    """
    aa, ab, bb = products.unbind(-1)
    return factor(share, ab, aa), factor(1 - share, ab, bb)


def factor(share: Array, ab: Array, aa: Array) -> Array:
    r"""Compute :math:`1 - (n_a/N)\, a \cdot b / |a|^2`, the factor of a in :func:`adasum`.

    1 where a is a zero vector. ``share`` is :math:`n_a / N`; all shapes broadcast.

    >>> factor(0.5, torch.tensor(1.0), torch.tensor(2.0))
    tensor(0.7500)
    """
    # For a zero vector a.b is zero as well: no branch is needed. NaN stays NaN.
    return 1.0 - share * (ab / (aa + (aa == 0.0)))


def tree(rows: Tensor, total: Callable[[Tensor], Tensor] = lambda products: products) -> Tensor:
    r"""Combine one layer of all ranks, ``rows`` (P, m), pair by pair, to (m,) in float64.

    .. math:: AS(g_{[0,n)}) = AS(AS(g_{[0,n/2)}), AS(g_{[n/2,n)}))

    Adjacent ranks are combined first; the last node of a level with an odd number of nodes moves
    up unchanged. The result depends on the order of the ranks. If ``rows`` are only a part of the
    layer, ``total`` adds the products of the other parts to those of a level, (pairs, 3). Extra
    memory: two copies in float64.

    Source: Maleki et al. 2021, equation 9, for powers of two.

    >>> tree(torch.tensor([[1.0], [2.0], [6.0]]))
    tensor([3.], dtype=torch.float64)
    """
    level: list[tuple[int, Tensor]] = [(1, row) for row in rows.double().unbind()]
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=False))
        products = total(torch.stack([_products(a, b) for (_, a), (_, b) in pairs]))
        merged = []
        for ((na, a), (nb, b)), known in zip(pairs, products, strict=True):
            ca, cb = pair_coefficients(known, na / (na + nb))
            merged.append((na + nb, ca * a + cb * b))
        level = merged + level[len(level) // 2 * 2 :]
    return level[0][1]


def add_gram(rows: Tensor, spans: Sequence[Segment], out: Tensor) -> None:
    r"""Add the inner products of all pairs of rows, layer by layer.

    .. math:: G_l \leftarrow G_l + X_l X_l^T

    ``rows`` (P, m) of any float dtype, ``out`` (layers, P, P) in float64. Products and sums are
    in float64, so that values of narrower dtypes neither overflow nor underflow. One pass.

    >>> out = torch.zeros(1, 2, 2, dtype=torch.float64)
    >>> add_gram(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), [Segment(0, 0, 2)], out)
    >>> out.tolist()
    [[[1.0, 1.0], [1.0, 2.0]]]
    """
    for span in spans:
        for start in range(span.start, span.stop, BLOCK):
            wide = rows[:, start : min(start + BLOCK, span.stop)].double()
            out[span.layer].addmm_(wide, wide.T)


class GramAnalysis(NamedTuple):
    """Adasum's coefficients and measures of every layer, in float64; see :func:`analyze`."""

    weights: Tensor  # (layers, P)
    cancelled: Tensor  # (layers,), booleans
    energy: Tensor  # (layers,)
    orthogonality: Tensor  # (layers,)


def coefficients(gram: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute the factor of each rank's vector in the result of :func:`tree`.

    .. math:: AS(g_{[0,n)}) = \sum_i c_i g_i, \qquad c = c(G), \quad G_{ij} = g_i \cdot g_j

    ``gram`` is G, (layers, P, P) in float64. Returns c, (layers, P), and (layers,) booleans: True
    where nearly opposite vectors have cancelled inside the tree and c has lost digits, so that
    :func:`tree` has to combine that layer. Non-finite inputs give non-finite c.

    >>> both, cancelled = coefficients(torch.tensor([[[1.0, 1.0], [1.0, 2.0]]]))
    >>> both, cancelled
    (tensor([[0.5000, 0.7500]]), tensor([False]))
    """
    weights, cancelled, *_ = analyze(gram)
    return weights, cancelled


def analyze(gram: Tensor) -> GramAnalysis:
    r"""Compute the coefficients, :math:`\sum_i |g_i|^2` and the orthogonality of all layers.

    ``gram`` is (layers, P, P) in float64. See :func:`coefficients` and :func:`orthogonality`.

    >>> analyze(torch.eye(2, dtype=torch.float64)[None]).energy
    tensor([2.], dtype=torch.float64)
    """
    return GramAnalysis(*follow_tree(gram_tree, gram, gram.new_zeros))


def follow_tree(tree: Callable[..., Any], gram: Array, zeros: Callable[..., Array]) -> list[Array]:
    """Call ``tree``, which is :func:`gram_tree`, on ``gram`` (layers, P, P) for any P.

    P is padded to a power of two with zero vectors, which change nothing. ``zeros`` makes an array
    of a shape. Returns the fields of :class:`GramAnalysis`.

    >>> gram = torch.eye(3)[None]
    >>> follow_tree(gram_tree, gram, gram.new_zeros)[0]
    tensor([[1., 1., 1.]])
    """
    layers, size = gram.shape[:2]
    padded = 1 << (size - 1).bit_length()
    nodes, leaves = zeros((padded, padded, layers)), zeros((padded, layers))
    nodes[:size, :size] = gram.swapaxes(0, 2)  # symmetric: the order of the other two is free
    leaves[:size] = 1
    weights = zeros((layers, size))
    found, *rest = tree(nodes, leaves)
    weights[:] = found[:size].swapaxes(0, 1)
    return [weights, *rest]


def gram_tree(gram: Array, leaves: Array) -> tuple[Array, Array, Array, Array]:
    r"""Compute what :func:`tree` does, from inner products alone, for all layers at once.

    Every node of the tree is a linear combination of the inputs. The inner products of one
    level's nodes follow from those of the level below, where :math:`c_i` is the :func:`factor` of
    node i and p is the parent of nodes 2p and 2p + 1:

    .. math:: G'_{pq} = \sum_{i \in \{2p, 2p+1\}} \sum_{j \in \{2q, 2q+1\}} c_i c_j G_{ij}

    ``gram`` (n, n, layers), ``leaves`` (n, layers): how many ranks' vectors a node holds, 1 or 0
    at first; n is a power of two. Returns weights (n, layers), cancelled, energy and
    orthogonality (layers,), see :class:`GramAnalysis`.

    These are array expressions that NumPy, torch and numba understand: the kernel of
    :mod:`offbeat.kernels.adasum` is this function, compiled.

    >>> weights, _, energy, _ = gram_tree(torch.eye(2)[..., None], torch.ones(2, 1))
    >>> weights.T, energy
    (tensor([[1., 1.]]), tensor([2.]))
    """
    size, layers = leaves.shape
    weights = leaves * 1.0  # a copy, multiplied by the factors on the way to the root
    energy = gram.reshape(size * size, layers)[:: size + 1].sum(0)
    cancelled = energy < 0.0  # False everywhere
    while size > 1:
        flat, pair = gram.reshape(size * size, layers), 2 * (size + 1)
        aa, ab, bb = flat[::pair], flat[1::pair], flat[size + 1 :: pair]
        na, nb = leaves[::2], leaves[1::2]
        leaves = na + nb
        total = leaves + (leaves == 0.0)
        ca, cb = factor(na / total, ab, aa), factor(nb / total, ab, bb)
        size //= 2
        halves = weights.reshape(size, 2, len(weights) // (2 * size), layers)
        halves[:, 0] *= ca[:, None]
        halves[:, 1] *= cb[:, None]
        rows = ca[:, None] * gram[::2] + cb[:, None] * gram[1::2]
        gram = ca * rows[:, ::2] + cb * rows[:, 1::2]
        if size > 1:  # the root is no operand
            parts = ca * ca * aa + cb * cb * bb
            left = gram.reshape(size * size, layers)[:: size + 1]
            lost = (left <= CANCELLATION * parts) & (parts > 0.0)
            cancelled = cancelled | (lost.sum(0) > 0)
    return weights, cancelled, energy, gram[0, 0] / energy


def combine_rows(rows: Tensor, spans: Sequence[Segment], weights: Tensor, out: Tensor) -> None:
    r"""Write the weighted sum of the rows, layer by layer: :math:`out_l = \sum_i c_{li} x_{li}`.

    ``rows`` is (P, m), ``weights`` (layers, P) in float64, and ``out`` (m,), which may be one of
    the rows. Sums are in float64 and rounded once. One pass.

    >>> out = torch.zeros(1)
    >>> combine_rows(
    ...     torch.tensor([[1.0], [2.0]]), [Segment(0, 0, 1)], torch.tensor([[3.0, 0.5]]), out
    ... )
    >>> out
    tensor([4.])
    """
    for span in spans:
        for start in range(span.start, span.stop, BLOCK):
            stop = min(start + BLOCK, span.stop)
            out[start:stop] = rows[:, start:stop].double().T.mv(weights[span.layer].double())


def orthogonality(gram: Tensor, weights: Tensor) -> Tensor:
    r"""Compute how close Adasum is to the sum, for each layer: 1 for orthogonal vectors.

    .. math:: |AS(g_{[0,n)})|^2 \Big/ \sum_i |g_i|^2

    ``gram`` is (layers, P, P) and ``weights`` (layers, P), see :func:`coefficients`. The result,
    (layers,), is 1/P for equal vectors and NaN if all are zero.

    Source: Maleki et al. 2021, section 5.1.3.

    >>> orthogonality(torch.eye(2)[None], torch.ones(1, 2))
    tensor([1.])
    """
    combined = (weights[:, None] @ gram @ weights[..., None]).squeeze((-2, -1))
    return combined / gram.diagonal(dim1=-2, dim2=-1).sum(-1)


def _products(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([(a * a).sum(), (a * b).sum(), (b * b).sum()])
