"""How far ranks have come, and what survivors of a loss agree on."""

from enum import IntEnum
from typing import NamedTuple


class Stage(IntEnum):
    """How far a rank is in a step: it computes, has the gradients that count, or has used them.

    Or the script has written the parameters since: then they are nothing to hand over.
    """

    COMPUTES = 0
    HAS_GRADIENTS = 1
    HAS_STEPPED = 2
    HAS_WRITTEN = 3


class Progress(NamedTuple):
    """How far a rank has come.

    Attributes:
        steps: its steps.
        commits: its exchanges that have committed.
        used: the steps of all ranks that are in these.
        holds: the exchanges whose results it holds, if more than it has committed.
        stage: where it is in the present step.
    """

    steps: int
    commits: int = 0
    used: int = 0
    holds: int = 0
    stage: int = Stage.COMPUTES

    @property
    def reached(self) -> tuple[int, int]:
        """What to compare between ranks: the farther one may hand over what it holds."""
        return (-1, 0) if self.stage == Stage.HAS_WRITTEN else (self.steps, self.stage)


class Agreement(NamedTuple):
    """Ranks that continue, ranks that are lost, and the first step with exchanges between all.

    ``commits``: the largest number of transactions that one of the living has committed; ``used``:
    the steps of all ranks that are in these. The ranks ``behind`` miss the result of the last one.
    They get the gradients of ``donor`` if it ``has_gradients``, and else what it has made of them.
    """

    living: tuple[int, ...]
    lost: tuple[int, ...]
    step: int
    commits: int = 0
    used: int = 0
    behind: tuple[int, ...] = ()
    donor: int = -1
    has_gradients: bool = False
