"""The members of a group of Gloo that are connected to each other."""

MESHED = 16  # connections of a rank in a group in which all pairs are connected, at most


def collective_peers(rank: int, size: int) -> set[int]:
    """Return the members to which collectives of Gloo connect ``rank``, the root being 0.

    >>> sorted(collective_peers(0, 9)), sorted(collective_peers(3, 9))
    ([1, 2, 4, 8], [1, 2, 4, 7])
    """
    # Sums and gathers run around a ring; a broadcast runs down a binomial tree, in which a rank
    # hears from the one without its highest bit, and speaks to those with one higher bit more. A
    # reduce, and a broadcast from another root, connect others too.
    tree = {rank ^ 1 << bit for bit in range(size.bit_length()) if rank >> bit <= 1}
    return {peer for peer in {*tree, (rank - 1) % size, (rank + 1) % size} if peer < size}


def is_mesh(size: int, connections: int) -> bool:
    """Return whether all pairs of ``size`` members are connected, each by so many connections."""
    return (size - 1) * connections <= MESHED


def lazy_peers(rank: int, size: int, connections: int) -> set[int]:
    """Return the members to which ``rank`` connects in a lazy group, whatever is sent in it."""
    if is_mesh(size, connections):
        return {*range(size)} - {rank}
    return collective_peers(rank, size)
