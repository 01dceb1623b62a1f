"""Recursive halving between any number of ranks: who holds what after each merge."""

import numpy as np
import pytest

from offbeat.functional import cells_of, merges
from offbeat.methods.adasum.method import choose, gram_bytes, halving_bytes


@pytest.mark.parametrize("length", [0, 5, 840])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 13])
def test_every_element_ends_at_one_rank_and_has_passed_all_vectors(size: int, length: int) -> None:
    """Play the merges with sets of ranks in place of numbers."""
    held = {rank: {i: {rank} for i in range(length)} for rank in range(size)}
    sent = np.zeros(size)
    found = sorted({m for rank in range(size) for m in merges(rank, size)}, key=lambda m: m.stop)
    for merge in sorted(found, key=lambda m: m.middle - m.first):
        kept: dict[int, dict[int, set[int]]] = {r: {} for r in range(merge.first, merge.stop)}
        for start, middle, stop, left, right in cells_of(merge, length):
            for i in range(start, stop):
                keeps, gives = (left, right) if i < middle else (right, left)
                kept[keeps][i] = held[keeps][i] | held[gives][i]
                sent[gives] += 1
        for rank in kept:
            assert set(kept[rank]) <= set(held[rank])
        held |= kept
    owners = [[rank for rank in range(size) if i in held[rank]] for i in range(length)]
    assert all(len(ranks) == 1 for ranks in owners)
    assert all(held[rank][i] == set(range(size)) for i, (rank,) in enumerate(owners))
    assert sent.sum() == (size - 1) * length
    if length == 840:
        assert max(map(len, held.values())) <= 840 / size + len(found)


@pytest.mark.parametrize("layers", [1, 5, 160, 2000])
@pytest.mark.parametrize("size", [2, 3, 8, 15, 100, 1000])
def test_auto_sends_at_most_two_models_and_a_twentieth(size: int, layers: int) -> None:
    """BERT-Large has 400 layers of 3 MB; here each has 36 KB."""
    model = layers * 36_000
    kind = choose("auto", size, layers, model, model)
    products = {"gram": gram_bytes, "rvhdd": halving_bytes, "gather": lambda *_: 0}[kind]
    bodies = size - 1 if kind == "gather" else 2 * (size - 1) / size
    sent = bodies * model + products(size, layers)
    assert sent <= 2.05 * model or (kind == "gather" and sent <= 2**19), kind
