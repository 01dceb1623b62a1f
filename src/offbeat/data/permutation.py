"""A keyed permutation of 0..n-1, computed entry by entry: nothing of size n is held."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

_ROUNDS = 8


def epoch_key(seed: int, epoch: int) -> tuple[int, ...]:
    """Return the round keys of an epoch, the same on every machine."""
    return tuple(map(int, np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)))


def permute(positions: Numbers, length: int, key: Sequence[int]) -> Numbers:
    r"""Return :math:`\pi(p)` for every position p, with a bijection :math:`\pi` of 0..length-1.

    A Feistel network on the smallest domain of whole bits that holds ``length`` numbers, at most
    twice as many. Numbers outside are mapped again until they are inside (cycle walking): two
    passes at most on average. One round: one half of the bits ^= hash(other half + round key).

    Extra memory: some arrays of the shape of ``positions``, int64. ``length``: at most 2^62.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), methods 2 and 3.

    >>> permute(np.arange(6), 6, epoch_key(seed=0, epoch=0)).tolist()
    [2, 0, 5, 4, 1, 3]
    >>> permute(np.array([0, 10**15]), 2**61, epoch_key(seed=0, epoch=1)).tolist()
    [614118228178427547, 2212183089204594997]
    """
    bits = max(2, (length - 1).bit_length())
    found = _network(np.asarray(positions, np.int64).astype(np.uint64), bits, key)
    while (outside := found >= np.uint64(length)).any():
        found[outside] = _network(found[outside], bits, key)
    return found.astype(np.int64)


def _network(numbers: NDArray[np.uint64], bits: int, key: Sequence[int]) -> NDArray[np.uint64]:
    split = np.uint64(bits // 2)
    halves = [numbers & _ones(bits // 2), numbers >> split]
    masks = _ones(bits // 2), _ones(bits - bits // 2)
    for number, round_key in enumerate(key):
        changed = number % 2
        halves[changed] = halves[changed] ^ (
            _hash(halves[1 - changed] + np.uint64(round_key)) & masks[changed]
        )
    return halves[0] | (halves[1] << split)


def _ones(bits: int) -> np.uint64:
    return np.uint64(2**bits - 1)


def _hash(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
