"""Graphs for gossip: what validation accepts is right, and what it refuses is named."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.topology.digraph import Digraph
from offbeat.topology.families import BipartiteExponential, Complete, Exponential, Ring
from offbeat.topology.graph import Peers, Topology, keeps_weights, mixing_matrix, validate
from offbeat.topology.phases import Phases, Symmetric
from reference.participants import Array
from reference.push_sum import (
    bipartite_exponential,
    complete,
    exponential,
    irregular,
    one_peer_exponential,
    ring,
)
from reference.test_mixing import CONTRACTION, impulse_error

FAMILIES = {Exponential(): one_peer_exponential, Ring(): ring, Complete(): complete}
every_family = pytest.mark.parametrize("topology", FAMILIES, ids=repr)
examples = settings(max_examples=50)
sizes, indices = st.integers(2, 64), st.integers(0, 1000)


@dataclass(frozen=True)
class Listed(Topology):
    """Graphs written out: ``graphs[index][rank]``."""

    graphs: tuple[tuple[Peers, ...], ...]

    def peers(self, rank: int, size: int, index: int) -> Peers:
        return self.graphs[index % len(self.graphs)][rank]

    def period(self, size: int) -> int:
        return len(self.graphs)


def listed(*matrices: Array) -> Listed:
    """The topology whose mixing matrices these are."""
    return Listed(
        tuple(tuple(_peers(matrix, j) for j in range(len(matrix))) for matrix in matrices)
    )


def _peers(matrix: Array, rank: int) -> Peers:
    others = [i for i in range(len(matrix)) if i != rank]
    send = tuple((i, float(matrix[i, rank])) for i in others if matrix[i, rank] > 0)
    receive = tuple(j for j in others if matrix[rank, j] > 0)
    return Peers(send, receive, float(matrix[rank, rank]))


@every_family
@examples
@given(size=sizes, index=indices)
def test_families_move_all_mass_to_peers_that_expect_it(
    topology: Topology, size: int, index: int
) -> None:
    graph = [topology.peers(rank, size, index) for rank in range(size)]
    for rank, peers in enumerate(graph):
        receivers = [to for to, _ in peers.send]
        assert all(0 <= peer < size and peer != rank for peer in (*receivers, *peers.receive))
        assert len(set(receivers)) == len(receivers)
        assert len(set(peers.receive)) == len(peers.receive)
        assert min(peers.keep, *(share for _, share in peers.send)) > 0
        # Exact in binary for halves; others add up to one within a rounding for each of them.
        total = peers.keep + sum(share for _, share in peers.send)
        assert abs(total - 1) < 1.2e-16 * (len(receivers) + 1)
    sent = {(rank, to) for rank, peers in enumerate(graph) for to, _ in peers.send}
    expected = {(source, rank) for rank, peers in enumerate(graph) for source in peers.receive}
    assert sent == expected


@every_family
@examples
@given(size=sizes, index=indices)
def test_families_repeat_after_their_period(topology: Topology, size: int, index: int) -> None:
    later = index + topology.period(size)
    for rank in (0, size // 2, size - 1):
        assert topology.peers(rank, size, index) == topology.peers(rank, size, later)


@every_family
def test_families_are_valid_connected_and_regular_at_every_size(topology: Topology) -> None:
    for size in (*range(2, 18), 31, 32, 33, 64):
        validate(topology, size)
        assert keeps_weights(topology, size)
        union = sum(mixing_matrix(topology, size, i) for i in range(topology.period(size)))
        assert all_reach_all(np.asarray(union) > 0)


def all_reach_all(edges: Array) -> bool:
    """Strong connection by walking from every participant; apart from the package's way."""
    size = len(edges)
    for start in range(size):
        found, front = {start}, [start]
        while front:
            here = front.pop()
            new = {int(i) for i in np.flatnonzero(edges[:, here])} - found
            found |= new
            front += new
        if len(found) < size:
            return False
    return True


@every_family
@examples
@given(size=sizes, index=indices)
def test_matrices_equal_the_references(topology: Topology, size: int, index: int) -> None:
    ours = mixing_matrix(topology, size, index)
    np.testing.assert_allclose(ours, FAMILIES[topology](size, index), rtol=0, atol=1e-15)


def matrix(size: int, index: int) -> Array:
    return mixing_matrix(Exponential(), size, index)


@pytest.mark.parametrize("size", CONTRACTION)
def test_one_peer_exponential_contracts_as_known(size: int) -> None:
    cycle = Exponential().period(size)
    assert cycle == int(np.ceil(np.log2(size)))
    errors = [impulse_error(matrix, size, n * cycle) for n in (1, 2, 4)]
    assert [float(f"{error:.5g}") for error in errors] == CONTRACTION[size]


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5])
def test_one_peer_exponential_is_exact_for_powers_of_two(rounds: int) -> None:
    """From any place in the cycle, and not one round earlier."""
    for start in range(rounds):
        assert impulse_error(lambda n, i, s=start: matrix(n, i + s), 2**rounds, rounds) == 0
    assert impulse_error(matrix, 2**rounds, rounds - 1) > 0


def test_the_ring_contracts_as_its_docstring_says() -> None:
    """By about 1 - 13/n^2 an exchange: its second eigenvalue is (1 + 2 cos(2 pi / n)) / 3."""
    for size in (8, 16, 32):
        eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(mixing_matrix(Ring(), size, 0))))
        assert eigenvalues[-2] == pytest.approx((1 + 2 * np.cos(2 * np.pi / size)) / 3)
        # Second order in 13/n^2, a fifth at n = 8.
        assert 1 - eigenvalues[-2] == pytest.approx(13 / size**2, rel=0.1)


# ---- what is refused ----------------------------------------------------------------------------

THIRD = 1 / 3
GOOD = (
    Peers(((1, 0.5),), (2,), 0.5),
    Peers(((2, 0.5),), (0,), 0.5),
    Peers(((0, 0.5),), (1,), 0.5),
)
FAULTS: dict[str, tuple[dict[int, Peers], str]] = {
    "self-edge in send": (
        {1: Peers(((2, 0.25), (1, 0.25)), (0,), 0.5)},
        "participant 1 lists itself as a peer",
    ),
    "self-edge in receive": (
        {1: Peers(((2, 0.5),), (0, 1), 0.5)},
        "participant 1 lists itself as a peer",
    ),
    "unmatched send": (
        {0: Peers(((1, THIRD), (2, THIRD)), (2,), THIRD)},
        "edge 0 -> 2 has no receive for it",
    ),
    "unmatched receive": ({0: Peers(((1, 0.5),), (2, 1), 0.5)}, "edge 1 -> 0 has no send for it"),
    "peer outside": (
        {2: Peers(((3, 0.5),), (1,), 0.5)},
        "participant 2 lists peer 3, expected 0..2",
    ),
    "negative peer": ({2: Peers(((0, 0.5),), (-1,), 0.5)}, "participant 2 lists peer -1"),
    "receiver twice": (
        {0: Peers(((1, 0.25), (1, 0.25)), (2,), 0.5)},
        "participant 0 lists a peer twice",
    ),
    "sender twice": ({0: Peers(((1, 0.5),), (2, 2), 0.5)}, "participant 0 lists a peer twice"),
    "too little": ({0: Peers(((1, 0.5),), (2,), 0.4)}, "participant 0 splits .* sum of 1"),
    "too much": ({0: Peers(((1, 0.5),), (2,), 0.6)}, "participant 0 splits .* sum of 1"),
    "negative share": ({0: Peers(((1, -0.5),), (2,), 1.5)}, "participant 0 .* positive shares"),
    "zero share": ({0: Peers(((1, 0.0),), (2,), 1.0)}, "participant 0 .* positive shares"),
    "keeps nothing": ({0: Peers(((1, 1.0),), (2,), 0.0)}, "participant 0 .* positive shares"),
    "not a number": ({0: Peers(((1, 0.5),), (2,), float("nan"))}, "participant 0 splits"),
    "never connected": (
        {
            0: Peers(((1, 0.5),), (1,), 0.5),
            1: Peers(((0, 0.5),), (0,), 0.5),
            2: Peers((), (), 1.0),
        },
        "participant [01] is not reachable from participant 2",
    ),
    "one way only": (
        {2: Peers((), (1,), 1.0), 0: Peers(((1, 0.5),), (), 0.5)},
        "participant 0 is not reachable from participant [12]",
    ),
}


def test_the_graph_that_the_faults_start_from_is_valid() -> None:
    validate(Listed((GOOD,)), 3)


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.fault(
    "a topology has unmatched sends, or shares that do not add up",
    "ValueError; names the exchange and the participant",
)
def test_validation_names_the_fault(what: str, at: int) -> None:
    """Also where only a later exchange of the period has it."""
    changes, match = FAULTS[what]
    bad = tuple(changes.get(rank, peers) for rank, peers in enumerate(GOOD))
    # Two exchanges connect what one leaves apart: such a graph must stand alone.
    graphs = (bad,) if "is not reachable" in match else (GOOD,) * at + (bad,)
    with pytest.raises(ValueError, match=match) as raised:
        validate(Listed(graphs), 3)
    assert "size 3" in str(raised.value)
    if "is not reachable" not in match:
        assert f"exchange {at}" in str(raised.value)


def test_a_period_without_graphs() -> None:
    with pytest.raises(ValueError, match=r"is not reachable|period"):
        validate(Listed(()), 3)


def test_graphs_that_connect_only_together_are_valid() -> None:
    """No single one of them does."""
    pair = np.array([[0.5, 0.5], [0.5, 0.5]])
    first, second = np.eye(3), np.eye(3)
    first[:2, :2] = second[1:, 1:] = pair
    for alone in (first, second):
        with pytest.raises(ValueError, match="is not reachable"):
            validate(listed(alone), 3)
    validate(listed(first, second), 3)


@st.composite
def digraphs(draw: st.DrawFn) -> Array:
    """A random column-stochastic matrix with a positive diagonal."""
    size = draw(st.integers(2, 9))
    edges = draw(st.lists(st.booleans(), min_size=size * size, max_size=size * size))
    weights = draw(st.lists(st.floats(0.01, 1.0), min_size=size * size, max_size=size * size))
    raw = np.array(edges).reshape(size, size) * np.array(weights).reshape(size, size)
    np.fill_diagonal(raw, np.diag(np.array(weights).reshape(size, size)))
    columns: Array = raw / raw.sum(0)
    return columns


@examples
@given(first=digraphs())
def test_validation_agrees_with_a_walk_over_the_graph(first: Array) -> None:
    topology, size = listed(first), len(first)
    if all_reach_all(first > 0):
        validate(topology, size)
    else:
        with pytest.raises(ValueError, match="is not reachable"):
            validate(topology, size)
    np.testing.assert_allclose(mixing_matrix(topology, size, 5), first, rtol=0, atol=0)


@examples
@given(graph=digraphs(), data=st.data())
@pytest.mark.fault(
    "a topology has unmatched sends, or shares that do not add up",
    "ValueError; names the exchange and the participant",
)
def test_one_broken_thing_in_a_random_graph_is_refused(graph: Array, data: st.DataObject) -> None:
    size = len(graph)
    topology = listed(graph)
    rank = data.draw(st.integers(0, size - 1))
    peers = topology.graphs[0][rank]
    breaks: list[Callable[[], Peers]] = [
        lambda: peers._replace(keep=peers.keep + 0.01),
        lambda: peers._replace(keep=-peers.keep),
        lambda: peers._replace(receive=(*peers.receive, rank)),
        lambda: peers._replace(receive=(*peers.receive, size)),
    ]
    if peers.receive:
        breaks.append(lambda: peers._replace(receive=peers.receive[1:]))
    if peers.send:
        breaks.append(lambda: Peers(peers.send[1:], peers.receive, peers.keep + peers.send[0][1]))
    broken = data.draw(st.sampled_from(breaks))()
    row = tuple(broken if i == rank else p for i, p in enumerate(topology.graphs[0]))
    with pytest.raises(ValueError, match=f"participant {rank} |the edge"):
        validate(replace(topology, graphs=(row,)), size)


# ---- weights ------------------------------------------------------------------------------------


def test_which_graphs_keep_the_weights() -> None:
    assert keeps_weights(listed(ring(5, 0)), 5)
    assert not keeps_weights(listed(irregular(5, 0)), 5)
    # Doubly stochastic, but neither symmetric nor uniform.
    shift = np.roll(np.eye(4), 1, axis=0)
    assert keeps_weights(listed(0.7 * np.eye(4) + 0.3 * shift), 4)
    # One irregular exchange among regular ones is enough.
    assert not keeps_weights(listed(ring(4, 0), irregular(4, 0), ring(4, 0)), 4)


@examples
@given(graphs=st.integers(2, 7).flatmap(lambda n: st.lists(sized(n), min_size=1, max_size=3)))
def test_weights_move_exactly_where_rows_do_not_sum_to_one(graphs: list[Array]) -> None:
    size = len(graphs[0])
    weights = np.ones(size)
    moved = False
    for graph in graphs:
        weights = graph @ weights
        moved |= bool(np.abs(weights - 1).max() > 1e-9)
    # Rounding of random shares stays far below 1e-9; a graph whose weights return to one by
    # themselves counts as moving, as keeps_weights does.
    assert keeps_weights(listed(*graphs), size) <= (not moved)


def sized(size: int) -> st.SearchStrategy[Array]:
    """Random digraphs of one size, regular ones among them."""
    return st.one_of(
        st.just(ring(size, 0)),
        st.integers(0, 9).map(lambda index: one_peer_exponential(size, index)),
        st.just(irregular(size, 0)),
    )


def test_hops_double_until_they_reach_around() -> None:
    for size in range(2, 65):
        period = Exponential().period(size)
        hops = [Exponential().peers(0, size, i).send[0][0] for i in range(period)]
        assert hops[0] == 1
        assert all(b == 2 * a for a, b in pairwise(hops))
        assert hops[-1] < size <= 2 * hops[-1]


@pytest.mark.parametrize("size", [*range(2, 10), 16, 17, 33, 64])
def test_every_number_of_peers_that_there_are_is_valid(size: int) -> None:
    powers = int(np.ceil(np.log2(size)))
    for peers in range(1, powers + 1):
        topology = Exponential(peers)
        validate(topology, size)
        assert keeps_weights(topology, size)
        for index in range(topology.period(size) + 1):
            ours = mixing_matrix(topology, size, index)
            np.testing.assert_allclose(ours, exponential(size, index, peers), rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match=rf"peers={powers + 1} at size {size}.*peers={powers} or"):
        validate(Exponential(powers + 1), size)


@pytest.mark.parametrize("size", [2, 4, 6, 8, 10, 16, 34, 64])
def test_bipartite_graphs_are_pairs_of_even_and_odd(size: int) -> None:
    topology = BipartiteExponential()
    validate(Symmetric(topology), size)
    for index in range(topology.period(size) + 1):
        ours = mixing_matrix(topology, size, index)
        assert np.array_equal(ours, bipartite_exponential(size, index))
        assert np.array_equal(ours, ours.T)
        even = np.arange(size) % 2 == 0
        assert not (ours - np.eye(size) / 2)[np.ix_(even, even)].any()


def test_pairs_need_an_even_number() -> None:
    with pytest.raises(ValueError, match=r"at size 5: pairs need an even number"):
        validate(BipartiteExponential(), 5)


def test_a_directed_graph_is_not_symmetric() -> None:
    with pytest.raises(ValueError, match="d_psgd needs a symmetric graph"):
        validate(Symmetric(Exponential()), 8)
    validate(Symmetric(Ring()), 7)


def test_graphs_of_networkx() -> None:
    star = Digraph(lambda size: networkx.star_graph(size - 1))
    validate(star, 5)
    assert not keeps_weights(star, 5)
    # The centre keeps a fifth, a leaf half.
    np.testing.assert_allclose(np.diag(mixing_matrix(star, 5, 0)), [0.2, 0.5, 0.5, 0.5, 0.5])
    turns = Digraph([networkx.DiGraph([(0, 1), (1, 2), (2, 0)]), networkx.path_graph(3)])
    validate(turns, 3)
    assert turns.period(3) == 2
    assert turns.peers(0, 3, 0) == Peers(((1, 0.5),), (2,), 0.5)
    assert turns.peers(0, 3, 3) == Peers(((1, 0.5),), (1,), 0.5)
    with pytest.raises(ValueError, match="3 nodes for 4 participants"):
        validate(turns, 4)
    with pytest.raises(ValueError, match="lists itself"):
        validate(Digraph(networkx.DiGraph([(0, 0), (0, 1), (1, 0)])), 2)
    with pytest.raises(ValueError, match="is not reachable from"):
        validate(Digraph(networkx.DiGraph([(0, 1), (1, 2)])), 3)
    with pytest.raises(ValueError, match="expected a networkx graph"):
        validate(Digraph([]), 3)


def test_phases_follow_one_another() -> None:
    phases = Phases(((2, Complete()), (3, Exponential(2)), (None, Ring())))
    validate(phases, 4)
    size = 4
    for index, expected in enumerate(
        [complete(size, 0)] * 2 + [exponential(size, i, 2) for i in range(3)] + [ring(size, 0)] * 3
    ):
        np.testing.assert_allclose(mixing_matrix(phases, size, index), expected, atol=1e-15)
        assert phases.is_mean(size, index) == (index < 2)
    assert keeps_weights(phases, 4)
    star = Digraph(lambda size: networkx.star_graph(size - 1))
    assert not keeps_weights(Phases(((2, star), (None, Ring()))), 4)


@pytest.mark.parametrize(
    "phases",
    [
        *(3, (), [1], [(None,)], [(3, Ring())]),
        *([(0, Ring()), (None, Ring())], [(2, "ring"), (None, Ring())]),
    ],
)
def test_what_is_no_schedule_is_a_value_error(phases: Any) -> None:
    with pytest.raises(ValueError, match="expected pairs of a number of exchanges and a Topology"):
        Phases(phases)
