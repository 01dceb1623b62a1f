"""The command line: ``offbeat plan``."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress

from offbeat.cli import plan_options as options
from offbeat.cli.link_options import NEAR, with_links
from offbeat.kit.imports import quiet_imports
from offbeat.kit.page import load_template
from offbeat.kit.terminal import exit_codes, print_line, standard_output
from offbeat.lab.network.links import LinkOptions

if TYPE_CHECKING:
    from offbeat.plan.result import Plan
    from offbeat.planner.question import Question

EPILOG = """
Examples:

- offbeat plan train.py --nodes 4,64,1024 --rate 1gbit --profile train.json

- offbeat plan --profile gpt2.json --rate 10gbit --latency 50us --late 1%:3x --report plan.html

- offbeat plan --profile gpt2.json --sites 4,4,6 --between 60ms@200mbit --loss 0.1%

- offbeat plan --profile gpt2.json --nodes 4 --straggler 0.5 --balanced

- offbeat plan --profile gpt2.json --ranks-per-node 8 --algorithms "ddp,sgp(within='local')"

- offbeat plan --profile gpt2.json --json | jq '.rows[].prediction.seconds'
"""


@with_links("loss", "sites", "between")
def plan(
    script: options.Script = None,
    arguments: options.Arguments = None,
    nodes: options.Nodes = None,
    ranks_per_node: options.RanksPerNode = 1,
    rate: options.Rate = "1gbit",
    latency: options.Latency = "100us",
    far: LinkOptions = NEAR,
    connections: options.Connections = 1,
    inside: options.Inside = "100gbit",
    half_duplex: options.HalfDuplex = False,
    jitter: options.Jitter = None,
    late: options.Late = None,
    straggler: options.Straggler = None,
    balanced: options.Balanced = False,
    algorithms: options.Algorithms = None,
    baseline: options.Baseline = None,
    device_factor: options.DeviceFactor = 1.0,
    profile: options.ProfileFile = None,
    steps: options.Steps = 30,
    env_only: options.EnvOnly = False,
    at: options.At = None,
    as_json: options.Json = False,
    report: options.Report = None,
) -> None:
    """Predict what each algorithm would take on a cluster, from a profile of one rank.

    The script runs alone on this machine for some steps, with the requirements of offbeat compare.
    Its profile holds the sizes of parameters, when their gradients are ready, the times of a step
    and their spread, and the speed of passes over memory. With --profile it is kept and reused. A
    profile of a model that does not fit here can be written by hand.

    A model of time then plays the exchanges of every algorithm on all ranks: which ranks wait for
    which, what overlaps with backward, and how links are shared. It does not know how fast an
    algorithm converges.

    Exit codes: 0 on success, 1 if the script failed, 2 for invalid options, 130 after Ctrl-C.
    """
    with quiet_imports():
        from offbeat.plan.result import Setup
        from offbeat.planner import arguments as given
        from offbeat.planner.question import Question
    console = Console(stderr=True)
    with exit_codes("interrupted"):
        if report is not None:
            load_template("offbeat.planner.report")  # before the work: jinja2 may be missing
        counts = given.parse_nodes(nodes, far["sites"])
        methods, against = given.methods_for(algorithms, baseline, ranks_per_node)
        links = given.links((rate, latency, inside), far, connections, not half_duplex)
        fabrics = given.fabrics(counts, ranks_per_node, links)
        shown = given.choose_at(at, counts)
        stretch, slow = given.stretches(late, straggler, balanced)
        factor = given.positive(device_factor, "device factor")
        alone = given.profile(profile, script, tuple(arguments or ()), steps, env_only, console)
        stragglers, spread = given.stragglers(jitter, stretch, alone)
        found, name = alone.on_device(factor), (script or profile or Path("profile")).name
        setup = Setup.of(name, found, fabrics[0], (spread, *slow), factor)
        question = Question(setup, methods, against, found, fabrics, stragglers)
        made = _predict(question, shown, console)
        if report is not None:
            _draw(question, made, report, console)
    _show(made, report, as_json)


def _show(made: "Plan", report: Path | None, as_json: bool) -> None:
    if as_json:
        typer.echo(made.to_json())
        return
    from offbeat.planner.report.table import details, overview

    output = standard_output(200)
    output.print(overview(made))
    output.print(details(made))
    if report is not None:
        print_line(output, str(report))


def _draw(question: "Question", made: "Plan", report: Path, console: Console) -> None:
    """Write the report, with a map of nodes and rates."""
    from offbeat.planner.question import win_map
    from offbeat.planner.report.page import write_report

    with console.status("drawing the map of nodes and rates"):
        write_report(made, win_map(question), report)


def _predict(question: "Question", at: int, console: Console) -> "Plan":
    """Predict all methods, with a progress bar in a terminal."""
    from offbeat.planner.question import make_plan

    total = len(question.methods) * len(question.fabrics)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("predicting", total=total)
        return make_plan(question, at, lambda: progress.advance(task))
