"""The argument ``within`` of recipes: ranks as participants, or nodes."""

from typing import Annotated, Literal

from offbeat.methods import Mean
from offbeat.settings import check_values

Within = Annotated[Literal["local"], "the ranks of a node"] | None


def mean_inside(within: Within) -> Mean | None:
    """Return the exchange of gradients inside a node, if there is one.

    >>> mean_inside("local")
    Mean(over='local', wire=None, bucket_mb=25.0, partition=False)
    """
    check_values(mean_inside, {"within": within})
    return Mean(over="local") if within == "local" else None


def participants(within: Within) -> Literal["world", "node"]:
    """Return who takes part in an exchange of parameters.

    >>> participants(None)
    'world'
    """
    return "node" if within == "local" else "world"
