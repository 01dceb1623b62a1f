"""When to exchange: every few steps, or in DASO's cycle; the same answer on every rank."""

from dataclasses import dataclass, replace
from math import inf
from typing import final


def due(step: int, every: int) -> bool:
    r"""Whether an exchange that acts every ``every`` steps acts after ``step`` earlier ones.

    .. math:: (k + 1) \bmod every = 0

    >>> [step for step in range(8) if due(step, every=4)]
    [3, 7]
    """
    return (step + 1) % every == 0


@final
@dataclass(frozen=True)
class Cadence:
    """B (``every``) and W (``wait``) of the moment, and what is known of the loss.

    ``best`` is the lowest loss so far, ``bad`` how many windows in a row were no better.
    """

    every: int
    wait: int
    best: float = inf
    bad: int = 0


@final
@dataclass(frozen=True)
class Cycle:
    r"""The phases of a run, in steps: warm-up, cycling, cool-down.

    Warm-up and cool-down are blocking: an exchange after every step. In cycling a sum starts
    after every B = ``every``-th step, and is merged W = ``wait`` steps later (B/4 unless given,
    and at least 1). Where the loss is on a plateau both are halved; at 1 they return to these
    values:

    .. math:: B \leftarrow \max(1, \lfloor B/2 \rfloor), \quad
        W \leftarrow \max(1, \lfloor W/2 \rfloor)

    A plateau is one as of :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`, with its relative
    ``threshold``: more than ``patience`` windows of ``report_every`` steps in a row whose mean
    loss is not below (1 - ``threshold``) times the lowest. What was lowest is forgotten when B
    and W return to their start. Windows count from the first step of cycling; one without a
    reported loss does not count.

    Warm-up and cool-down are a twentieth of ``total_steps`` each unless given, and without
    ``total_steps`` cycling has no end. Steps beyond ``total_steps`` are as those of the cool-down.

    Raises ``ValueError`` for counts that mean nothing: a wait longer than B, phases longer than
    the run, a cool-down of a run without an end.

    Source: Coquelin et al. 2021, section 3.

    >>> cycle = Cycle(every=8, total_steps=100)
    >>> cycle.start, [cycle.is_blocking(step) for step in (4, 5, 94, 95)]
    (Cadence(every=8, wait=2, best=inf, bad=0), [True, False, False, True])
    """

    every: int = 4
    wait: int | None = None
    total_steps: int | None = None
    warmup_steps: int | None = None
    cooldown_steps: int | None = None
    patience: int = 10
    threshold: float = 1e-4
    report_every: int = 50

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}, expected a whole number, {least} or more")
        if self.wait is not None and self.wait > self.every:
            raise ValueError(
                f"wait={self.wait} with every={self.every}: a sum would still travel when the "
                "next is due; use wait <= every"
            )
        if not isinstance(self.threshold, int | float) or not 0 <= self.threshold < 1:
            raise ValueError(
                f"threshold={self.threshold!r}, expected a share of the loss, from 0 to below 1"
            )
        if self.total_steps is None and self.cooldown_steps:
            raise ValueError(
                f"cooldown_steps={self.cooldown_steps} without total_steps: nobody knows when it "
                "begins; give total_steps, the number of optimizer steps of the whole run"
            )
        if self.total_steps is not None and self._ends < self._begins:
            raise ValueError(
                f"warmup_steps={self._begins} and cooldown_steps={self.total_steps - self._ends} "
                f"are more than total_steps={self.total_steps}; make them fit"
            )

    @property
    def start(self) -> Cadence:
        """B and W as they are given."""
        return Cadence(self.every, max(1, self.every // 4) if self.wait is None else self.wait)

    @property
    def blocks_ever(self) -> bool:
        """Whether any step can be a blocking one."""
        return self._begins > 0 or self.total_steps is not None

    def is_blocking(self, step: int) -> bool:
        """Whether the step after ``step`` earlier ones averages and waits for it."""
        return step < self._begins or step >= self._ends

    def opens(self, step: int) -> bool:
        """Whether a blocking phase begins with this step."""
        return self.is_blocking(step) and (step == 0 or not self.is_blocking(step - 1))

    def sends(self, step: int, pace: Cadence) -> bool:
        """Whether a sum is to start after this step: none that would end after the run."""
        ends = min(step + pace.wait, self._ends)
        in_time = self.total_steps is None or ends < self.total_steps
        return not self.is_blocking(step) and (step + 1) % pace.every == 0 and in_time

    def listens(self, step: int) -> bool:
        """Whether a window of losses ends with this step."""
        if self.is_blocking(step):
            return False
        return (step - self._begins + 1) % self.report_every == 0

    def after(self, loss: float, pace: Cadence) -> Cadence:
        """The pace after a window with this mean ``loss``.

        >>> cycle = Cycle(every=4, wait=1, patience=0)
        >>> pace = cycle.after(1.0, cycle.start)
        >>> for _ in range(3):
        ...     pace = cycle.after(1.0, pace)
        ...     print(pace.every, pace.wait)
        2 1
        1 1
        4 1
        """
        if loss < pace.best * (1 - self.threshold):
            return replace(pace, best=loss, bad=0)
        if pace.bad < self.patience:
            return replace(pace, bad=pace.bad + 1)
        if pace.every == 1:
            return self.start
        return Cadence(max(1, pace.every // 2), max(1, pace.wait // 2), pace.best)

    @property
    def _begins(self) -> int:
        """The first step of cycling."""
        return self._part if self.warmup_steps is None else self.warmup_steps

    @property
    def _ends(self) -> float:
        """The first step of the cool-down."""
        if self.total_steps is None:
            return inf
        return self.total_steps - (
            self._part if self.cooldown_steps is None else self.cooldown_steps
        )

    @property
    def _part(self) -> int:
        return (self.total_steps or 0) // 20


_LEAST = {
    "every": 1,
    "wait": 1,
    "total_steps": 1,
    "warmup_steps": 0,
    "cooldown_steps": 0,
    "patience": 0,
    "report_every": 1,
}
_OPTIONAL = ("wait", "total_steps", "warmup_steps", "cooldown_steps")
