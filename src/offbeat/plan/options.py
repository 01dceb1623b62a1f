"""The options of ``offbeat plan``, as typer reads them, and the parsing of some."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.compare import Method, parse_methods
from offbeat.compare.options import Arguments, EnvOnly
from offbeat.plan.profile import Profile
from offbeat.plan.stragglers import Stragglers, parse_jitter, parse_late

__all__ = ["Arguments", "EnvOnly", "parse_late"]

DEFAULT = (
    "ddp,adasum,lags,sgp,sgp(overlap=1,wire='bf16'),d_psgd,local_sgd,daso,diloco,"
    "diloco(delay=5,wire='int8'),sparse_loco,noloco,ad_psgd,alone"
)

DEFAULT_INSIDE = (
    "ddp,adasum(within='local'),lags,sgp(within='local'),sgp(overlap=1,wire='bf16',within='local'),"
    "d_psgd(within='local'),local_sgd(within='local'),daso,diloco(within='local'),"
    "diloco(delay=5,wire='int8',within='local'),sparse_loco(within='local'),noloco(within='local'),"
    "ad_psgd(within='local'),alone"
)

Script = Annotated[
    Path | None,
    typer.Argument(
        help="Training script in Python that accepts --algorithm TEXT and --steps N, or see "
        "--env-only. Not needed with a --profile that exists.",
        show_default=False,
    ),
]
Nodes = Annotated[
    str, typer.Option(metavar="N,N,...", help="Numbers of nodes, separated by commas.")
]
RanksPerNode = Annotated[int, typer.Option(metavar="N", help="Ranks on every node.")]
Rate = Annotated[
    str, typer.Option(metavar="RATE", help="Rate of each node's link, for example 1gbit.")
]
Latency = Annotated[
    str,
    typer.Option(metavar="TIME", help="Time of one message beside its bytes, for example 100us."),
]
Inside = Annotated[
    str, typer.Option(metavar="RATE", help="Rate between the ranks of a node, in each direction.")
]
HalfDuplex = Annotated[
    bool, typer.Option("--half-duplex", help="Links carry one direction at a time.")
]
Jitter = Annotated[
    str | None,
    typer.Option(
        metavar="measured|PERCENT",
        help="How much steps differ: as in the profile, or a standard deviation such as 5%. "
        "Default: measured, if the profile has it.",
    ),
]
Late = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT:FACTORx",
        help="Share of steps that take longer, and how much: 1%:3x.",
    ),
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="Algorithms, separated by commas, in the order of preference. `offbeat recipes` "
        "lists them. Default: all kinds, with within='local' if nodes have several ranks.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="ALGORITHM", help="Reference for speed-ups. Default: the first algorithm."
    ),
]
DeviceFactor = Annotated[
    float,
    typer.Option(metavar="FACTOR", help="How much faster the nodes compute than the profile."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Read the profile from this file if it exists, else measure and write it.",
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps of the profile, passed as --steps.")]
At = Annotated[
    int | None,
    typer.Option(
        "--at",
        metavar="N",
        help="Number of nodes to show in detail and to recommend for. Default: the last one.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE.html", help="Write an HTML report to this file.")
]


def methods_for(
    given: str | None, baseline: str | None, ranks_per_node: int
) -> tuple[tuple[Method, ...], Method]:
    """Return the methods to plan and their baseline; one of them at least must exchange."""
    text = given or (DEFAULT if ranks_per_node == 1 else DEFAULT_INSIDE)
    methods, against = parse_methods(text, baseline)
    if all(method.is_floor for method in methods):
        raise ValueError(
            f"algorithms: got {text!r}, which exchanges nothing; add one to choose, for example "
            f"ddp,{text}"
        )
    return methods, against


def choose_at(at: int | None, counts: Sequence[int]) -> int:
    """Return the number of nodes to show in detail."""
    if at is not None and at not in counts:
        raise ValueError(f"at: got {at}, expected one of the numbers of nodes {[*counts]}")
    return counts[-1] if at is None else at


def positive(value: float, name: str) -> float:
    """Return a finite value above 0, or raise ValueError."""
    if not 0 < value < math.inf:  # nan is neither
        raise ValueError(f"{name}: got {value:g}, expected a number above 0")
    return value


def stragglers(
    jitter: str | None, late: Mapping[str, Any], profile: Profile
) -> tuple[Stragglers, str]:
    """Return the stragglers, and the text of their jitter: measured unless it is given."""
    text = jitter or ("measured" if profile.spread else "0%")
    return Stragglers(**parse_jitter(text, profile.spread), **late), text


def parse_nodes(text: str) -> list[int]:
    """Parse numbers of nodes.

    >>> parse_nodes("4,8,4096")
    [4, 8, 4096]
    """
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or sorted(set(counts)) != counts:
        raise ValueError(
            f"nodes: got {text!r}, expected ascending whole numbers separated by commas; for "
            "example 4,64,1024"
        )
    return counts
