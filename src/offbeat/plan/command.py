"""The command line: ``offbeat plan``."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from offbeat.kit.page import load_template
from offbeat.kit.quantity import parse_rate
from offbeat.kit.terminal import exit_codes, print_line, standard_output
from offbeat.plan import options
from offbeat.plan.by_hand import read_profile
from offbeat.plan.fabric import Fabric, parse_latency
from offbeat.plan.measure import measure_profile
from offbeat.plan.profile import Profile
from offbeat.plan.question import Question, make_plan, win_map
from offbeat.plan.report.page import ROOM, write_report
from offbeat.plan.report.table import details, overview
from offbeat.plan.result import Plan, Setup

EPILOG = """
Examples:

- offbeat plan train.py --nodes 4,64,1024 --rate 1gbit --profile train.json

- offbeat plan --profile gpt2.json --rate 10gbit --latency 50us --late 1%:3x --report plan.html

- offbeat plan --profile gpt2.json --ranks-per-node 8 --algorithms "ddp,sgp(within='local')"

- offbeat plan --profile gpt2.json --json | jq '.rows[].prediction.seconds'
"""


def plan(
    script: options.Script = None,
    arguments: options.Arguments = None,
    nodes: options.Nodes = "4,8,16,64,256,1024,4096",
    ranks_per_node: options.RanksPerNode = 1,
    rate: options.Rate = "1gbit",
    latency: options.Latency = "100us",
    inside: options.Inside = "100gbit",
    half_duplex: options.HalfDuplex = False,
    jitter: options.Jitter = None,
    late: options.Late = None,
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
    console = Console(stderr=True)
    with exit_codes("interrupted"):
        if report is not None:
            load_template(ROOM)  # a missing jinja2 is reported before the work, not after it
        counts = options.parse_nodes(nodes)
        methods, against = options.methods_for(algorithms, baseline, ranks_per_node)
        fabrics = _fabrics(counts, ranks_per_node, (rate, latency, inside), not half_duplex)
        shown = options.choose_at(at, counts)
        stretch, factor = options.parse_late(late), options.positive(device_factor, "device factor")
        given = script, tuple(arguments or ()), steps, env_only
        alone = _profile(profile, *given, console)
        stragglers, spread = options.stragglers(jitter, stretch, alone)
        name = (script or profile or Path("profile")).name
        found = alone.on_device(factor)
        setup = Setup.of(name, found, fabrics[0], (spread, late or "none"), factor)
        question = Question(setup, methods, against, found, fabrics, stragglers)
        made = _predict(question, shown, console)
        if report is not None:
            with console.status("drawing the map of nodes and rates"):
                write_report(made, win_map(question), report)
    if as_json:
        typer.echo(made.to_json())
        return
    output = standard_output(200)
    output.print(overview(made))
    output.print(details(made))
    if report is not None:
        print_line(output, str(report))


def _fabrics(
    counts: Sequence[int], each: int, texts: tuple[str, str, str], full_duplex: bool
) -> tuple[Fabric, ...]:
    """Return the networks of all sizes; ``texts`` are the rate, the latency and the rate inside."""
    rate, latency, inside = parse_rate(texts[0]), parse_latency(texts[1]), parse_rate(texts[2])
    shared = {"rate": float(rate), "latency": latency, "inside_rate": float(inside)}
    return tuple(
        Fabric(nodes=nodes, ranks_per_node=each, full_duplex=full_duplex, **shared)
        for nodes in counts
    )


def _profile(
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
    found = measure_profile(script, arguments, steps, env_only, console)
    if path is not None:
        found.write(path)
        print_line(console, f"written: {path}")
    return found


def _predict(question: Question, at: int, console: Console) -> Plan:
    """Predict all methods, with a progress bar in a terminal."""
    total = len(question.methods) * len(question.fabrics)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("predicting", total=total)
        return make_plan(question, at, lambda: progress.advance(task))
