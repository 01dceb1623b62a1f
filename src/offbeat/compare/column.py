"""The columns of the table, in the terminal and on the page alike."""

from collections.abc import Callable
from typing import NamedTuple

from offbeat.compare import quantity
from offbeat.compare.result import Comparison, Result, Spread

DASH = "–"


class Cell(NamedTuple):
    """A number, and what belongs below or beside it in small."""

    text: str
    detail: str = ""


class Column(NamedTuple):
    """One number of every method. ``meaning`` says in a sentence what it is."""

    title: str
    unit: str
    meaning: str
    cell: Callable[[Result], Cell]


def columns(comparison: Comparison) -> list[Column]:
    """All of them; the one about the target loss names it."""
    if (target := comparison.target_loss) is None:
        return _COLUMNS
    unit = f"loss {quantity.loss(target)}"
    return [c._replace(unit=unit) if c.unit == "target loss" else c for c in _COLUMNS]


def _time(result: Result) -> Cell:
    if result.seconds_per_step is None:
        return Cell(result.state if result.state != "done" else DASH)
    return _spread(result.seconds_per_step, quantity.seconds, result.rounds > 1)


def _faster(result: Result) -> Cell:
    if result.is_baseline and result.faster:
        return Cell("1×")
    return _spread(result.faster, quantity.times, False)


def _share(result: Result) -> Cell:
    if result.share_of_floor is None or result.floor is None:
        return Cell(DASH)
    share, floor = result.share_of_floor.median, result.floor.median
    return Cell(quantity.percent(share), quantity.seconds(floor))


def _spread(spread: Spread | None, text: Callable[[float], str], ends: bool) -> Cell:
    if spread is None:
        return Cell(DASH)
    return Cell(text(spread.median), _range(spread, text) if ends else "")


def _range(spread: Spread, text: Callable[[float], str]) -> str:
    """Both ends, without a unit if it is the same."""
    low, _, unit = text(spread.min).partition(" ")
    high, _, same = text(spread.max).partition(" ")
    return f"{low}–{high}" if unit == same else f"{low} {unit}–{high} {same}"


_COLUMNS = [
    Column(
        "time",
        "per step",
        "Mean over all steps after the warm-up, without evaluations, on the slowest rank. In "
        "small the least and the most of all rounds.",
        _time,
    ),
    Column(
        "faster",
        "than baseline",
        "The baseline's time over this one's in the same round; the median of those.",
        _faster,
    ),
    Column(
        "floor",
        "÷ time",
        "The least a step can take, as a share of what it takes. The floor, in small, is a "
        "step without communication, or its bytes and their TCP headers over the link's rate, "
        "whichever is longer. Ratios of the same round, and their median.",
        _share,
    ),
    Column(
        "sent",
        "step and node",
        "What all ranks of the busiest node send on the axes world and node, collectives "
        "counted as a ring sends them; with several ranks a node, world counts what stays inside "
        "too. 1 MB is 10⁶ bytes.",
        lambda result: _spread(result.bytes_per_step, quantity.size, False),
    ),
    Column(
        "stalled",
        "per step",
        "How long the training loop waited for others; mean over ranks. Unknown for "
        "torch-ddp, which waits inside backward.",
        lambda result: _spread(result.stall_per_step, quantity.seconds, False),
    ),
    Column(
        "train",
        "loss",
        "Mean over the last tenth of the steps and all ranks.",
        lambda result: _spread(result.final_loss, quantity.loss, False),
    ),
    Column(
        "held-out",
        "loss",
        "The last one that the script reported; mean over ranks.",
        lambda result: _spread(result.heldout_loss, quantity.loss, False),
    ),
    Column(
        "time to",
        "target loss",
        "Seconds of training, evaluations apart, until the mean training loss over a tenth of "
        "the run first was as low as the target: the worst final loss of all methods, "
        "unless --target-loss says otherwise.",
        lambda result: _spread(result.seconds_to_target, quantity.seconds, False),
    ),
    Column(
        "distance",
        "of replicas",
        "How far replicas are from their average just before finish(): Euclidean distance of "
        "all parameters, mean over replicas.",
        lambda result: _spread(result.consensus_distance, quantity.distance, False),
    ),
]
