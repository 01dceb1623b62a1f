"""What steps of a method are worth, as measured on a small model."""

from dataclasses import dataclass
from typing import final

SOURCE = "a GPT on characters with 4 workers (docs/choosing.md)"
# Steps of ddp until a loss, divided by those of the recipe: python -m bench run choose/sooner
MEASURED = {
    "ddp()": 1.0,
    "lags(density=0.05)": 0.61,
    "adasum(every=4)": 0.72,
    "sgp(overlap=2)": 0.88,
    "sgp(overlap=2,wire='bf16')": 0.88,
    "daso(every=8)": 0.68,
    "local_sgd(every=24)": 0.73,
    "diloco(every=24)": 0.56,
    "diloco(every=24,fragments=2,delay=6,wire='int8')": 0.68,
    "sparse_loco(every=8)": 0.56,
}
PARTS = "fragments=", "wire="  # of the settings, what makes another method


@final
@dataclass(frozen=True)
class Worth:
    """Steps of ddp divided by those of the method until the same loss, measured as ``recipe``."""

    steps: float
    recipe: str

    def __str__(self) -> str:
        settings = self.recipe.partition("(")[2].removesuffix(")").replace(",", ", ")
        return f"{self.steps:.2f}" + (f" ({settings})" if settings else "")


def worth(text: str) -> Worth | None:
    """Return what was measured of a recipe, with other settings perhaps; None if nothing was.

    >>> str(worth("local_sgd(every=4)"))
    '0.73 (every=24)'
    """

    def alike(recipe: str) -> list[bool]:
        return [(part in recipe) == (part in text) for part in PARTS]

    family = text.partition("(")[0]
    known = [recipe for recipe in MEASURED if recipe.partition("(")[0] == family]
    best = max(known, key=alike, default=None)
    return None if best is None else Worth(MEASURED[best], best)
