"""The command line: ``offbeat doctor``."""

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from offbeat.kit.imports import quiet_imports
from offbeat.kit.terminal import exit_codes, standard_output

if TYPE_CHECKING:
    from offbeat.doctor import Report

EPILOG = """
Examples:

- offbeat doctor

- torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint node0:29500 -m offbeat doctor

- offbeat lab --nodes 4 --rate 250mbit -- python -m offbeat doctor
"""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check this machine, and under torchrun the links between all ranks.

    Each finding has a verdict (ok, note, warning or error) and a fix. Under torchrun, or another
    launcher, all ranks measure the rate, the round trip and the clocks of their links, in about
    half a minute, and rank 0 prints what all have found, with the methods that suffer. Paste the
    output into a bug report.

    Exit codes: 0 without an error, 1 with one.
    """
    with exit_codes("interrupted"):
        report = _examine()
    if report is None:
        return
    if as_json:
        typer.echo(report.to_json())
    else:
        standard_output(110).print(report.table())
    raise typer.Exit(report.has_errors)


def _examine() -> "Report | None":
    """Return the report; None on ranks other than the first."""
    from offbeat.doctor import Finding, Report, links
    from offbeat.doctor.addresses import addresses, port_range

    with quiet_imports():
        try:
            from offbeat.doctor.machine import lab, machine
        except ImportError as error:  # a torch that does not fit
            return Report([Finding("torch", "error", str(error))])
    from offbeat.doctor.diagnosis import diagnose

    launched = links.is_launched()
    findings = [*machine(), *addresses(launched)]
    if not launched:
        return Report([*findings, lab()])
    if fault := links.launcher_fault() or links.store_fault():
        return Report([*findings, fault])
    if os.environ["RANK"] == "0":
        Console(stderr=True).print("measuring the links between all ranks")
    if (found := links.examine(findings)) is None:
        return None
    merged, measured = found
    return Report([*merged, *diagnose(measured, port_range())], measured)
