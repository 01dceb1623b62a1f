"""What the ranks of a world of threads raise."""

from collections.abc import Callable, Sequence

from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

SECONDS = (
    8.0  # until an error must be there: an agreed error takes a few heartbeats, here 0.1 s each
)


def errors_of(
    work: Callable[[World], object],
    size: int = 0,
    nodes: Sequence[Sequence[int]] | None = None,
    seconds: float = 60.0,
) -> list[Exception | None]:
    """Return what ``work`` raises on each rank, None where nothing."""

    def guarded(world: World) -> Exception | None:
        try:
            work(world)
        except Exception as error:
            return error
        return None

    return ThreadWorld(size, nodes).run(guarded, timeout=seconds)


def alike(
    work: Callable[[World], object],
    size: int = 2,
    nodes: Sequence[Sequence[int]] | None = None,
    seconds: float = SECONDS,
) -> str:
    """Return the text of the ``ValueError`` that ``work`` raises on every rank, in time."""
    errors = errors_of(work, size, nodes, seconds)
    assert {type(error) for error in errors} == {ValueError}, errors
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    return texts.pop()
