"""The numbers by which Accelerate divides data and decides who saves, without a process group."""

from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.extras import extra
from offbeat.replica.replica import Replica
from offbeat.transport.world import World

with extra("accelerate"):
    from accelerate import PartialState
    from accelerate.state import AcceleratorState


class StorePlace:
    """The place of this process in the store at ``OFFBEAT_STORE``, as Accelerate sees it.

    Attributes:
        starters: how many ranks have started the run: the number of shares of the data.
    """

    def __init__(self) -> None:
        """Wait for a place; raise ``ValueError`` if Accelerate has a process group."""
        if (kind := PartialState().distributed_type.value) != "NO":
            raise ValueError(
                f"elastic=True, and Accelerate has a process group ({kind}), which breaks with the "
                "first rank that is lost; start each process by `python`, with one visible device, "
                "and OFFBEAT_STORE"
            )
        world = World.from_env(elastic=True)
        self.starters = world.size - world.is_new
        self._number(world)

    def adopt(self, replica: Replica) -> bool:
        """Number this rank among those that take part now; return whether it is the first."""
        self._number(replica.world)
        return bool(PartialState().is_main_process)

    @contextmanager
    def share(self, number: int, shares: int) -> Iterator[None]:
        """Divide the data of loaders that are prepared inside the block into ``shares``."""
        before = PartialState().process_index, PartialState().num_processes
        _set(number, shares)
        try:
            yield
        finally:
            _set(*before)

    def _number(self, world: World) -> None:
        _set(world.ranks.index(world.rank), self.starters)


def _set(index: int, count: int) -> None:
    for state in (PartialState(), AcceleratorState()):  # the second has copied the first
        state.process_index, state.num_processes = index, count
