"""When to exchange: every few steps, or in DASO's phases; the same answer on every rank."""

from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Annotated, final

from offbeat.settings import at_least, between, check_settings


def due(step: int, every: int) -> bool:
    r"""Return whether an exchange that acts every ``every`` steps acts in this one.

    .. math:: (k + 1) \bmod every = 0

    where k = ``step`` is the number of earlier steps.

    >>> [step for step in range(8) if due(step, every=4)]
    [3, 7]
    """
    return (step + 1) % every == 0


@final
@dataclass(frozen=True)
class Cadence:
    """Holds the current B (``every``) and W (``wait``), and the record of the loss.

    ``best`` is the lowest mean loss of a window so far, and ``bad`` the number of windows in a row
    that did not improve on it.
    """

    every: int
    wait: int
    best: float = inf
    bad: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class Cycle:
    r"""Defines the phases of DASO: warm-up, cycling, cool-down. All lengths are in steps.

    Warm-up and cool-down are blocking: the nodes average after every step and wait for the result.
    In cycling a sum starts after every B-th step (B = ``every``), and is merged W = ``wait`` steps
    later (B/4 unless given, and at least 1). On a plateau of the loss both are halved; when B is
    already 1 both return to their initial values:

    .. math:: B \leftarrow \max(1, \lfloor B/2 \rfloor), \quad
        W \leftarrow \max(1, \lfloor W/2 \rfloor)

    A plateau is defined as in :class:`torch.optim.lr_scheduler.ReduceLROnPlateau` with a relative
    ``threshold``: more than ``patience`` windows of ``report_every`` steps in a row whose mean
    loss is not below (1 - ``threshold``) times the lowest. The lowest loss is reset when B and W
    return to their initial values. Windows are counted from the first step of cycling; a window
    without a reported loss is ignored.

    Warm-up and cool-down take a twentieth of ``total_steps`` each unless given. Without
    ``total_steps`` there is no cool-down. Steps beyond ``total_steps`` are blocking.

    Raises ``ValueError`` for settings out of range, a ``wait`` longer than ``every``, phases
    longer than the run, and a cool-down without ``total_steps``.

    Source: Coquelin et al. 2021, section 3.

    >>> cycle = Cycle(every=8, total_steps=100)
    >>> cycle.start, [cycle.is_blocking(step) for step in (4, 5, 94, 95)]
    (Cadence(every=8, wait=2, best=inf, bad=0), [True, False, False, True])
    """

    every: Annotated[int, at_least(1, "steps")] = 4
    wait: Annotated[int, at_least(1, "steps")] | None = None
    total_steps: Annotated[int, at_least(1, "steps")] | None = None
    warmup_steps: Annotated[int, at_least(0, "steps")] | None = None
    cooldown_steps: Annotated[int, at_least(0, "steps")] | None = None
    patience: Annotated[int, at_least(0, "windows")] = 10
    threshold: Annotated[float, between(0, 1, closed="left")] = 1e-4
    report_every: Annotated[int, at_least(1, "steps")] = 50

    def __post_init__(self) -> None:
        """Check the settings, and that the phases fit into the run."""
        check_settings(self)
        if self.wait is not None and self.wait > self.every:
            raise ValueError(
                f"wait={self.wait} with every={self.every}: a sum would still be in flight when "
                "the next is due; use wait <= every"
            )
        if self.total_steps is None and self.cooldown_steps:
            raise ValueError(
                f"cooldown_steps={self.cooldown_steps} without total_steps: the start of the "
                "cool-down is unknown; give total_steps, the number of optimizer steps of the run"
            )
        if self.total_steps is not None and self._ends < self._begins:
            raise ValueError(
                f"warmup_steps={self._begins} and cooldown_steps={self.total_steps - self._ends} "
                f"are more than total_steps={self.total_steps}; shorten them or lengthen the run"
            )

    @property
    def start(self) -> Cadence:
        """The initial B and W."""
        wait = max(1, self.every // 4) if self.wait is None else self.wait
        return Cadence(every=self.every, wait=wait)

    @property
    def blocks_ever(self) -> bool:
        """Whether any step can be blocking: only then are 16-bit messages allocated."""
        return self._begins > 0 or self.total_steps is not None

    def is_blocking(self, step: int) -> bool:
        """Return whether the nodes average and wait after ``step`` earlier steps."""
        return step < self._begins or step >= self._ends

    def opens(self, step: int) -> bool:
        """Return whether this step is the first of a blocking phase."""
        return self.is_blocking(step) and (step == 0 or not self.is_blocking(step - 1))

    def sends(self, step: int, cadence: Cadence) -> bool:
        """Return whether a sum starts after this step; no sum may be due after ``total_steps``."""
        due_at = min(step + cadence.wait, self._ends)
        in_time = self.total_steps is None or due_at < self.total_steps
        return not self.is_blocking(step) and due(step, cadence.every) and in_time

    def ends_window(self, step: int) -> bool:
        """Return whether this step is the last of a window of losses."""
        return not self.is_blocking(step) and due(step - self._begins, self.report_every)

    def after(self, loss: float, cadence: Cadence) -> Cadence:
        """Return the cadence after a window whose mean loss is ``loss``.

        >>> cycle = Cycle(every=4, wait=1, patience=0)
        >>> cadence = cycle.after(1.0, cycle.start)
        >>> for _ in range(3):
        ...     cadence = cycle.after(1.0, cadence)
        ...     print(cadence.every, cadence.wait)
        2 1
        1 1
        4 1
        """
        if loss < cadence.best * (1 - self.threshold):
            return replace(cadence, best=loss, bad=0)
        if cadence.bad < self.patience:
            return replace(cadence, bad=cadence.bad + 1)
        if cadence.every == 1:
            return self.start
        every, wait = max(1, cadence.every // 2), max(1, cadence.wait // 2)
        return Cadence(every=every, wait=wait, best=cadence.best)

    def reaches(self, cadence: Cadence) -> bool:
        """Return whether :meth:`after` can lead to ``cadence``, of any loss.

        >>> Cycle(every=8).reaches(Cadence(every=8, wait=4))
        False
        """
        start = self.start
        halved = [(max(1, start.every >> n), max(1, start.wait >> n)) for n in range(64)]
        is_known = (cadence.every, cadence.wait) in halved
        return is_known and 0 <= cadence.bad <= self.patience and not isnan(cadence.best)

    @property
    def _begins(self) -> int:
        """The first step of cycling."""
        return self._twentieth if self.warmup_steps is None else self.warmup_steps

    @property
    def _ends(self) -> float:
        """The first step of the cool-down; infinite without ``total_steps``."""
        if self.total_steps is None:
            return inf
        cooldown = self._twentieth if self.cooldown_steps is None else self.cooldown_steps
        return self.total_steps - cooldown

    @property
    def _twentieth(self) -> int:
        return (self.total_steps or 0) // 20
