"""A statement of a paper, or a goal, and whether the measurements agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, stdev

HEADINGS = ("claim", "paper or goal", "ours", "holds")
GOAL = "goal"  # the source of a claim that no paper makes
SHARE = 1 / 3  # of a paper's effect, at least, that ours must have
NEAR = 1.0  # %, a difference of accuracies that does not count
ERRORS = 2  # standard errors, at least, by which ours must differ from none


@dataclass(frozen=True)
class Effect:
    """A difference, or with the unit "x" a factor, and its standard error over runs."""

    size: float
    unit: str = "%"
    error: float = 0.0  # 0: not known

    @classmethod
    def mean(cls, sizes: Sequence[float], unit: str = "%") -> "Effect":
        """The effect in the mean of independent runs."""
        error = stdev(sizes) / sqrt(len(sizes)) if len(sizes) > 1 else 0.0
        return cls(fmean(sizes), unit, error)

    @classmethod
    def between(cls, ours: Sequence[float], others: Sequence[float], unit: str = "%") -> "Effect":
        """By how much, or with "x" how many times, ours are more than the others, run by run."""
        pairs = zip(ours, others, strict=True)
        return cls.mean([a / b if unit == "x" else a - b for a, b in pairs], unit)

    @property
    def gain(self) -> float:
        """What differs from no effect: a factor of 1.00 gains nothing."""
        return self.size - 1 if self.unit == "x" else self.size

    @property
    def is_beyond_noise(self) -> bool:
        return abs(self.gain) > ERRORS * self.error

    def is_above(self, other: "Effect") -> bool:
        """Whether it is larger than that of other runs by more than noise."""
        return self.size - other.size > ERRORS * hypot(self.error, other.error)

    def __format__(self, form: str) -> str:
        return f"{self.size:{form}} ± {self.error:{form}}" if form else str(self)

    def __str__(self) -> str:
        size = f"{self.size:.2f}" if self.unit == "x" else f"{self.size:+.1f}"
        error = f" ± {self.error:.2f}" if self.unit == "x" else f" ± {self.error:.1f}"
        return f"{size}{error if self.error else ''} {self.unit}"


@dataclass(frozen=True)
class Claim:
    """The paper's figure, ours, and whether the claim holds."""

    text: str
    paper: str
    ours: str
    holds: bool
    source: str = ""  # a table or figure of the paper; "": the only one of its bench
    needs: str = ""  # hardware without which it cannot be shown
    share: float | None = None  # of the paper's effect; None: an order or a bound, not an effect

    @classmethod
    def effect(cls, text: str, paper: Effect, ours: Effect, source: str = "") -> "Claim":
        """Ours must be a third of the paper's effect, and more than noise."""
        share = ours.gain / paper.gain
        holds = share >= SHARE and ours.is_beyond_noise
        return cls(text, str(paper), str(ours), holds, source, share=share)

    @property
    def row(self) -> tuple[str, str, str, str]:
        verdict = "yes" if self.holds else "NO"
        return self.text, self.paper, self.ours, f"needs {self.needs}" if self.needs else verdict


def at_most(
    text: str, ours: float, bound: float, form: str = "{:.2f} x", of: str = "", source: str = ""
) -> Claim:
    """``form`` shows both figures, ``of`` tells what ours is about."""
    said = f"{form.format(ours)} {of}".rstrip()
    return Claim(text, f"at most {form.format(bound)}", said, bool(ours <= bound), source)


def at_least(
    text: str, ours: float, bound: float, form: str = "{:.2f} x", of: str = "", source: str = ""
) -> Claim:
    said = f"{form.format(ours)} {of}".rstrip()
    return Claim(text, f"at least {form.format(bound)}", said, bool(ours >= bound), source)


def less(
    text: str, ours: float, theirs: float, form: str = "{:.3f}", paper: str = "lower"
) -> Claim:
    said = f"{form.format(ours)} against {form.format(theirs)}"
    return Claim(text, paper, said, bool(ours < theirs))
