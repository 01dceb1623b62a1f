"""Addresses of the members of a group of Gloo, which a small group reads in one call."""

from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore, Store

SMALL = 64  # members: all addresses are then 10 kB


def with_addresses(store: Store, size: int, opened: Callable[[Store], Any]) -> Any:
    """Return the lazy backend that ``opened`` makes; all members call.

    Gloo asks the store twice for each member that it connects to, one after the other: that takes
    seconds where the store is 100 ms away. So it is given a store in memory, which holds the
    addresses of all members.
    """
    if size > SMALL:
        return opened(store)
    known: Any = HashStore()  # multi_set is not in the stubs
    backend = opened(known)
    own = known.list_keys()  # one for each connection of a pair, "number/rank"
    there: Any = store
    there.multi_set(own, known.multi_get(own))
    keys = [f"{key.rsplit('/', 1)[0]}/{other}" for key in own for other in range(size)]
    known.multi_set(keys, there.multi_get(keys))
    return backend
