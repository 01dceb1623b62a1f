"""The two slots of a training step, and what fills them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, final

from offbeat.exchange.interface import GradientExchange, ParameterExchange


@final
@dataclass(frozen=True)
class Auto:
    """Algorithms as text, in the order of preference, among which a run chooses as it goes on."""

    candidates: tuple[str, ...]


@final
@dataclass(frozen=True, repr=False)
class Algorithm:
    """Combines the exchanges of the two slots; built by a recipe, or directly.

    Errors, notes and records show its short text: the call of the recipe, or its exchanges joined
    by a plus. ``repr()`` shows every setting, and is what ranks compare.

    >>> from offbeat.methods import Mean
    >>> from offbeat.methods import Average
    >>> Algorithm(gradients=Mean(over="local"), parameters=Average(every=8, over="node"))
    Algorithm(gradients=Mean(over='local', ...), parameters=Average(every=8, over='node', ...))
    >>> print(Algorithm(gradients=Mean(over="local"), parameters=Average(every=8, over="node")))
    Mean(over='local') + Average(every=8, over='node')
    """

    gradients: GradientExchange | None = None
    parameters: ParameterExchange | None = field(default=None)
    end: int = field(default=0, kw_only=True)
    then: "Algorithm | None" = field(default=None, kw_only=True)
    auto: Auto | None = field(default=None, kw_only=True)
    recipe: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for contents that are no exchange, or do not fit together."""
        for slot, kind in (("gradients", GradientExchange), ("parameters", ParameterExchange)):
            filling = getattr(self, slot)
            if filling is not None and not isinstance(filling, kind):
                raise ValueError(
                    f"the {slot} slot holds {filling!r}, expected a {kind.__name__}; "
                    f"recipes such as offbeat.ddp() and offbeat.sgp() fill the right slots"
                )
        if self.end and self.then is None:
            raise ValueError(f"end={self.end!r} without then=: give what goes on after that step")
        following = self.then if self.then is None else self.then.end or self.end + 1
        if following is not None and not 0 < self.end < following:
            raise ValueError(
                f"a schedule with {self} after step {self.end}: steps count from the start of the "
                "run, 1 or more, and increase"
            )
        halves = [slot.partition for slot in (self.gradients, self.parameters) if slot]
        if any(halves) and halves != [True, True]:
            raise ValueError(
                f"partition=True in one slot of {self}: one slot reduces gradients to the owners "
                "of layers, the other gathers the layers they have stepped; set it in both"
            )

    def until(self, step: int, then: "Algorithm") -> "Algorithm":
        """Return a schedule: this algorithm for ``step`` steps of the run, and then another one.

        After the last phase of this one, if it is a schedule itself.

        >>> from offbeat import ddp, local_sgd
        >>> print(ddp().until(200, local_sgd(every=4)))
        ddp() until step 200, then local_sgd(every=4)
        """
        if self.then is not None:
            return self._with(then=self.then.until(step, then))
        return self._with(end=step, then=then)

    def chosen_by(self, auto: Auto) -> "Algorithm":
        """Return this algorithm as a choice of ``auto``, which goes on choosing."""
        return self._with(auto=auto)

    def _with(self, **more: Any) -> "Algorithm":
        made = replace(self, **more)
        object.__setattr__(made, "recipe", self.recipe)
        return made

    @property
    def phases(self) -> Iterator["Algorithm"]:
        """Each algorithm of a schedule, with those that follow."""
        yield self
        if self.then is not None:
            yield from self.then.phases

    def leads_to(self, phase: "Algorithm") -> bool:
        """Whether this may stand where ``phase`` was given: before it, or chosen by it."""
        chosen = phase.auto is not None and any(each.auto == phase.auto for each in self.phases)
        return chosen or self.then == phase

    def following(self, steps: int) -> "Algorithm | None":
        """Return what goes on after ``steps`` steps of the run in place of this, or None."""
        return self.then if steps >= self.end else None

    def __repr__(self) -> str:
        """Return every setting."""
        shown = f"gradients={self.gradients!r}, parameters={self.parameters!r}"
        if self.then is not None:
            shown += f", end={self.end}, then={self.then!r}"
        if self.auto is not None:
            shown += f", auto={self.auto!r}"
        return f"Algorithm({shown})"

    def __str__(self) -> str:
        """Return the call of its recipe, or its exchanges; without arguments that are defaults."""
        exchanges = (self.gradients, self.parameters)
        text = self.recipe or " + ".join(str(slot) for slot in exchanges if slot) or "Algorithm()"
        return text if self.then is None else f"{text} until step {self.end}, then {self.then}"
