"""The command line: ``offbeat plan``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from offbeat.cli.compare import Arguments, EnvOnly
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

Script = Annotated[
    Path | None,
    typer.Argument(
        help="Training script in Python that accepts --algorithm TEXT and --steps N, or see "
        "--env-only. Not needed with a --profile that exists.",
        show_default=False,
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Numbers of nodes, separated by commas. Default: 4,8,16,64,256,1024,4096, or those of "
        "--sites.",
    ),
]
RanksPerNode = Annotated[int, typer.Option(metavar="N", help="Ranks on every node.")]
Rate = Annotated[
    str, typer.Option(metavar="RATE", help="Rate of each node's link, for example 1gbit.")
]
Latency = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time of a message beside its bytes from one node to another, half a round trip, for "
        "example 100us; with --sites, inside of one.",
    ),
]
Connections = Annotated[
    int, typer.Option(metavar="N", help="Connections of two nodes, as in replicate().")
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
Straggler = Annotated[
    str | None,
    typer.Option(
        metavar="FRACTION", help="Let one rank compute only this fraction of the time: 0.5."
    ),
]
Balanced = Annotated[
    bool,
    typer.Option(
        "--balanced", help="Sizes of batches follow the speeds of ranks, with --straggler."
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


@with_links("loss", "sites", "between")
def plan(
    script: Script = None,
    arguments: Arguments = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = 1,
    rate: Rate = "1gbit",
    latency: Latency = "100us",
    far: LinkOptions = NEAR,
    connections: Connections = 1,
    inside: Inside = "100gbit",
    half_duplex: HalfDuplex = False,
    jitter: Jitter = None,
    late: Late = None,
    straggler: Straggler = None,
    balanced: Balanced = False,
    algorithms: Algorithms = None,
    baseline: Baseline = None,
    device_factor: DeviceFactor = 1.0,
    profile: ProfileFile = None,
    steps: Steps = 30,
    env_only: EnvOnly = False,
    at: At = None,
    as_json: Json = False,
    report: Report = None,
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
        texts = rate, latency, inside
        fabrics = given.fabrics(counts, ranks_per_node, texts, far, connections, not half_duplex)
        shown = given.choose_at(at, counts)
        stretch, slow = given.stretches(late, straggler, balanced)
        factor = given.positive(device_factor, "device factor")
        alone = given.profile(profile, script, tuple(arguments or ()), steps, env_only, console)
        stragglers, spread = given.stragglers(jitter, stretch, alone.spread)
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
