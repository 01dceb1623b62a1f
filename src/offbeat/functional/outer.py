r"""Outer optimization: the pseudo-gradient, the blend, and the fragments of Streaming DiLoCo.

Source: Douillard et al. 2023, Algorithm 1, and Douillard et al. 2025, Algorithm 2. All tensors
are flat.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from offbeat.functional.packing import balance, cache_blocks


def pseudo_gradient(anchor: Tensor, mean: Tensor, delta: Tensor) -> None:
    r"""Fill ``delta`` with what an outer optimizer takes for the gradient.

    .. math:: \Delta = a - m, \qquad m \leftarrow m - (a - \Delta)

    for the anchor a, the parameters after the last outer step, and the mean m of the
    participants' parameters now. ``mean`` then holds what rounding has taken from it: add it to
    the anchor after the outer step. So SGD with a learning rate of 1 and no momentum gives the
    mean bit for bit, whatever the ratio of a to m. One pass: reads a and m, writes both others.

    >>> anchor, mean = torch.tensor([1.0]), torch.tensor([1e-9])
    >>> pseudo_gradient(anchor, mean, delta := torch.zeros(1))
    >>> delta, anchor - delta, anchor - delta + mean  # the difference itself loses 1e-9
    (tensor([1.]), tensor([0.]), tensor([1.0000e-09]))
    """
    for a, m, d in cache_blocks(anchor, mean, delta):
        torch.sub(a, m, out=d)
        m.sub_(a - d)


def blend(anchor: Tensor, x: Tensor, mixing: float) -> None:
    r"""Set parameters to a mix of their own value and of the new anchor, in place.

    .. math:: x \leftarrow \alpha x + (1 - \alpha) a

    with alpha = ``mixing``: 0 discards the steps made since the parameters were sent, 1 ignores
    what was received. Exact in both cases.

    >>> blend(torch.tensor([2.0]), x := torch.tensor([4.0]), mixing=0.25)
    >>> x
    tensor([2.5000])
    """
    if mixing == 0:
        x.copy_(anchor)  # also where x is not finite
    else:
        torch.lerp(anchor, x, mixing, out=x)


def layer_of(name: str) -> str:
    """Return the name of the layer of a parameter: its block, or else its module.

    A block is an entry of a list of modules, the outermost one.

    >>> [layer_of(name) for name in ("blocks.1.mlp.0.weight", "embed.weight", "scale")]
    ['blocks.1', 'embed', 'scale']
    """
    block = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return block[0] if block else name.rpartition(".")[0] or name


def divide_layers(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide parameters of ``sizes`` bytes into ``parts`` sets of whole layers.

    Layers of one size are dealt out in turn, the "strided" order of Douillard et al. 2025,
    section 2.3; larger ones come first, each to the smallest set (:func:`balance`), so that all
    messages take about the same time. A set is empty if there are fewer layers.

    >>> divide_layers({"embed.w": 8, "blocks.0.w": 4, "blocks.1.w": 4, "blocks.2.w": 4}, parts=2)
    [['embed.w', 'blocks.2.w'], ['blocks.0.w', 'blocks.1.w']]
    """
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        layers[layer_of(name)] = layers.get(layer_of(name), 0) + size
    home = dict(zip(layers, balance(list(layers.values()), parts), strict=True))
    return [[name for name in sizes if home[layer_of(name)] == part] for part in range(parts)]
