"""The demo's figures: as a table for people and as a file for programs."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

Record = dict[str, float]
Figures = dict[str, float | None]

ROWS = (
    ("held-out loss at the start", "heldout_loss_start", "{:.3f}"),
    ("held-out loss at the end", "heldout_loss_end", "{:.3f}"),
    ("training loss at the end", "train_loss_end", "{:.3f}"),
    ("steps per second", "steps_per_second", "{:.1f}"),
    ("MB sent per step and rank", "megabytes_per_step_and_rank", "{:.2f}"),
    ("seconds waiting", "seconds_waiting", "{:.1f}"),
    ("share of time waiting", "share_waiting", "{:.0%}"),
    ("consensus distance, peak in the run", "consensus_distance_peak", "{:.2g}"),
    ("  before finish, mean over ranks", "consensus_distance_mean", "{:.2g}"),
    ("  before finish, largest", "consensus_distance_max", "{:.2g}"),
    ("seconds of training", "seconds_training", "{:.1f}"),
    ("seconds with start and reports", "seconds_total", "{:.1f}"),
)


def summary(records: Sequence[Record], seconds_total: float) -> Figures:
    """The figures of a run; None where it did not measure one."""
    first, last = records[0], records[-1]
    distances = [record["distance_max"] for record in records if "distance_max" in record]
    sent, waiting = last.get("bytes_sent"), last.get("seconds_stalled")
    return {
        "heldout_loss_start": first["heldout_loss"],
        "heldout_loss_end": last["heldout_loss"],
        "train_loss_end": last["train_loss"],
        "steps_per_second": last["step"] / last["seconds"],
        "megabytes_per_step_and_rank": None if sent is None else sent / last["step"] / 1e6,
        "seconds_waiting": waiting,
        "share_waiting": None if waiting is None else waiting / last["seconds"],
        "consensus_distance_peak": max(distances, default=None),
        "consensus_distance_mean": last.get("distance_mean"),
        "consensus_distance_max": last.get("distance_max"),
        "seconds_training": last["seconds"],
        "seconds_total": seconds_total,
    }


def table(figures: Mapping[str, Figures]) -> Table:
    """One column a run."""
    result = Table(title="Losses in nats per character")
    result.add_column("method")
    for algorithm in figures:
        result.add_column(algorithm, justify="right")
    for title, key, style in ROWS:
        values = [run[key] for run in figures.values()]
        result.add_row(title, *("-" if v is None else style.format(v) for v in values))
    return result


def save(
    figures: Mapping[str, Figures],
    curves: Mapping[str, Sequence[Record]],
    workers: int,
    path: Path,
) -> None:
    """Write all figures and curves as JSON."""
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cpu_count": os.cpu_count(),
        "workers": workers,
        "runs": [
            {"algorithm": name} | figures[name] | {"curve": list(curves[name])} for name in figures
        ],
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
