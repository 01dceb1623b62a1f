"""The argument ``within`` of recipes: ranks as participants, or nodes."""

from typing import Annotated, Literal

from offbeat.methods import Mean
from offbeat.settings import check_values

Within = Annotated[Literal["local"], "the ranks of a node"] | None


def levels(within: Within) -> tuple[Mean | None, Literal["world", "node"]]:
    """Return the exchange of gradients inside a node, if there is one, and who exchanges models.

    >>> levels("local")
    (Mean(over='local', wire=None, bucket_mb=25.0, partition=False), 'node')
    """
    check_values(levels, {"within": within})
    return (Mean(over="local"), "node") if within else (None, "world")
