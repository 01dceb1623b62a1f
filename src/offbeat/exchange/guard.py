"""What happens where a rank's parameters are not finite: all ranks stop, or it takes no part."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from offbeat.exchange import Site, State, Variable, count_fault, plain
from offbeat.functional import all_finite, pack

Nonfinite = Literal["raise", "skip"]


def error_of_step(who: str, name: str) -> ValueError:
    """Return the error for a parameter that the optimizer's step of "rank 1" has spoiled."""
    return ValueError(
        f"{who}: parameter {name!r} is not finite after the optimizer's step; go "
        "back to a checkpoint and lower the learning rate, use a GradScaler, or let such steps be "
        "skipped with nonfinite='skip'"
    )


def error_of_second_skip(who: str, name: str) -> ValueError:
    """Return the error for a rank that would be skipped twice in a row."""
    return ValueError(
        f"{who}: parameter {name!r} is not finite after two steps in a row, which "
        "nonfinite='skip' does not cure: the optimizer's state is probably not finite either (one "
        "NaN stays in the moments of Adam for ever); go back to a checkpoint, and use a "
        "GradScaler, which skips the optimizer's step too"
    )


@dataclass(eq=False)
class Guard(State):
    """Keeps parameters of this rank that are not finite from the others, before an exchange.

    With "raise" all ranks raise the same error. With "skip" the rank returns to the parameters
    that it had after its last step, ``kept``, and contributes those. It decides alone, and the
    others do not wait for its decision. ``who`` is what errors call it, such as "rank 1".

    The check reads the parameters once: on a CPU 0.6 ms for 3.2 million. On a GPU the host waits
    for the optimizer's step; so "raise" checks only where an exchange is due.
    """

    site: Site
    kept: list[Tensor] | None
    who: str
    skipped: int = 0
    skipped_last: bool = False

    @classmethod
    def of(
        cls,
        site: Site,
        nonfinite: Nonfinite,
        kept: list[Tensor] | None = None,
        unit: Literal["rank", "node"] = "rank",
    ) -> "Guard":
        """Allocate the copy that "skip" needs, unless the exchange has one, ``kept``."""
        who = f"{unit} {site.world.rank}"
        if nonfinite == "raise":
            return cls(site, None, who)
        if site.shards is not None:
            raise ValueError(
                "nonfinite='skip' with a sharded model: the ranks of a node would have to agree on "
                "every step, and wait for each other; use nonfinite='raise'"
            )
        if kept is None:
            kept = [parameter.detach().clone() for parameter in site.parameters.values()]
        return cls(site, kept, who)

    def check(self, due: bool = True) -> None:
        """Check the parameters before an exchange, if one is ``due``; "skip" checks all steps."""
        if not due and self.kept is None:
            return
        name = self._find()
        if name is not None and (self.kept is None or self.skipped_last):
            error = error_of_second_skip if self.skipped_last else error_of_step
            raise self._report_error(error(self.who, name))
        self.skipped_last = name is not None
        if self.kept is not None and self.skipped_last:
            pack(self.site.parameters.values(), self.kept)
            self.skipped += 1

    def require(self) -> None:
        """Raise on all ranks if a parameter is not finite: an average has no step to go back to."""
        if (name := self._find()) is not None:
            raise self._report_error(error_of_step(self.who, name))

    def keep(self) -> None:
        """Note the parameters after a step, or where training starts anew."""
        if self.kept is not None:
            pack(self.kept, self.site.parameters.values())

    def measures(self) -> dict[str, float]:
        """Return the number of skipped steps of this rank, with "skip"."""
        return {} if self.kept is None else {"skipped": self.skipped}

    def state(self) -> Iterator[Variable]:
        """Yield the counts, with "skip"; between steps the copy equals the parameters."""
        if self.kept is not None:
            kept = self.kept
            yield Variable(
                "kept",
                "derived",
                lambda: [part.clone() for part in kept],
                lambda saved: pack(kept, saved),
                memory=kept,
            )
            yield plain("own", self, "skipped", count_fault)
            yield plain("own", self, "skipped_last")

    def _find(self) -> str | None:
        """Return the name of the first parameter that is not finite, or None."""
        parameters = {name: p.detach() for name, p in self.site.parameters.items()}
        if all_finite(parameters.values()):
            return None
        return next((name for name, p in parameters.items() if not p.isfinite().all()), None)

    def _report_error(self, error: ValueError) -> Exception:
        """Make ``error`` that of all ranks: they wait for what this one does not send."""
        control = self.site.control
        return error if control is None else control.detector.report_error(error)
