"""What the options of ``offbeat plan`` mean: methods, networks, stragglers and the profile."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from offbeat.compare import Method, parse_methods
from offbeat.kit import quantity
from offbeat.kit.quantity import parse_rate
from offbeat.kit.terminal import print_line
from offbeat.lab.network.links import LinkOptions, Links
from offbeat.lab.network.wire import parse_loss
from offbeat.plan.by_hand import read_profile
from offbeat.plan.fabric import Fabric
from offbeat.plan.profile import Profile
from offbeat.plan.sites import Sites
from offbeat.plan.stragglers import Stragglers
from offbeat.planner.measure import measure_profile

NODES = "4,8,16,64,256,1024,4096"
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
    """Return a value between a millionth and a million, or raise ValueError."""
    if not 1e-6 <= value <= 1e6:  # nan is neither
        raise ValueError(f"{name}: got {value:g}, expected a number from 1e-06 to 1e+06")
    return value


def stretches(
    late: str | None, straggler: str | None, balanced: bool
) -> tuple[dict[str, Any], tuple[str, str]]:
    """Return what makes ranks late or slow, as arguments of Stragglers, and the texts of both.

    >>> stretches("1%:3x", "0.5", False)[0]
    {'late_share': 0.01, 'late_factor': 3.0, 'first_factor': 2.0, 'balanced': False}
    """
    found: dict[str, Any] = {} if late is None else _parse_late(late)
    if straggler is not None:
        expected = "the fraction of the time that one rank computes, for example 0.5"
        fraction = quantity.parse(straggler, "straggler", {"": 0}, expected, 1e-3, 1)
        found |= {"first_factor": 1 / fraction, "balanced": balanced}
    elif balanced:
        raise ValueError("balanced: without a slow rank; add --straggler, for example 0.5")
    slow = f"{straggler}, balanced" if balanced else straggler
    return found, (late or "none", slow or "none")


def _parse_late(text: str) -> dict[str, float]:
    expected = "a percentage and a factor, for example 1%:3x"
    try:
        share, factor = text.split(":")
        late = quantity.parse(share, "late", {"%": -2}, expected, most=1)
        return {"late_share": late, "late_factor": quantity.parse(factor, "late", {"x": 0}, "", 1)}
    except ValueError:
        raise ValueError(f"late: got {text!r}, expected {expected}") from None


def stragglers(
    jitter: str | None, late: Mapping[str, Any], spread: Sequence[float]
) -> tuple[Stragglers, str]:
    """Return the stragglers, and the text of their jitter, by default that of the profile.

    ``spread`` are the times of its steps over their mean.

    >>> stragglers("5%", {}, ())[0].jitter
    0.05
    """
    text = jitter or ("measured" if spread else "0%")
    if text.strip() != "measured":
        expected = "'measured' or a percentage, for example 5%"
        deviation = quantity.parse(text, "jitter", {"%": -2}, expected)
        return Stragglers(jitter=deviation, **late), text
    if not spread:
        raise ValueError(
            "jitter: got 'measured', but the profile has no \"spread\"; give a standard deviation, "
            "for example 5%"
        )
    return Stragglers(measured=spread, **late), text


def parse_nodes(text: str | None, sites: Sequence[int] = ()) -> list[int]:
    """Parse numbers of nodes; with ``sites`` the only one is that of their nodes.

    >>> parse_nodes("4,8,4096"), parse_nodes(None, (4, 4, 6))
    ([4, 8, 4096], [14])
    """
    if text is None:
        text = str(sum(sites)) if sites else NODES
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


def fabrics(
    counts: Sequence[int],
    each: int,
    texts: tuple[str, str, str],
    far: LinkOptions,
    connections: int,
    full_duplex: bool,
) -> tuple[Fabric, ...]:
    """Return the networks of all sizes; ``texts`` are the rate, the latency and the rate inside."""
    expected = "a number with ns, us, ms or s; for example 100us"
    rate, inside = parse_rate(texts[0]), parse_rate(texts[2], name="inside")
    latency = quantity.parse(texts[1], "latency", quantity.TIME_UNITS, expected)
    sites = Sites.of(Links.parse(sites=far["sites"], between=far["between"]))
    first = Fabric(
        nodes=counts[0],
        ranks_per_node=each,
        rate=float(rate),
        latency=latency,
        inside_rate=float(inside),
        full_duplex=full_duplex,
        loss=parse_loss(far["loss"]),
        connections=connections,
        sites=sites,
    )
    return tuple(replace(first, nodes=nodes) for nodes in counts)


def profile(
    path: Path | None,
    script: Path | None,
    arguments: tuple[str, ...],
    steps: int,
    env_only: bool,
    console: Console,
) -> Profile:
    """Read the profile if its file exists; else measure it, and write it if there is a file."""
    if script is not None and not script.is_file():
        raise ValueError(
            f"script: got {str(script)!r}, which is not a file; give a training script in Python, "
            "or none with a --profile that exists"
        )
    if path is not None and path.exists():
        if script is not None:
            print_line(console, f"profile: read from {path}, the script was not run")
        return read_profile(path)
    if script is None:
        missing = "no script" if path is None else f"no script, and no file {str(path)!r}"
        raise ValueError(
            f"profile: got {missing}; give a training script to measure, or a profile written by "
            "hand: offbeat plan --profile FILE"
        )
    if path is not None and not path.parent.is_dir():
        raise ValueError(
            f"profile: got {str(path)!r}, whose folder does not exist; create it, or pass another"
        )
    found = measure_profile(script, arguments, steps, env_only, console)
    if path is not None:
        found.write(path)
        print_line(console, f"written: {path}")
    return found
