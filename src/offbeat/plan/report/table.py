"""The tables of a plan in a terminal."""

from rich import box
from rich.table import Table

from offbeat.compare import quantity
from offbeat.plan.recommend import WORDS
from offbeat.plan.result import Plan, Row

UNKNOWN = (
    "A plan knows times and bytes, not convergence: how the methods learn is measured on the page "
    "Benchmarks of the documentation (docs/benchmarks), and offbeat compare measures it on "
    "your script."
)


def overview(plan: Plan) -> Table:
    """Return the time of a step of every method for every number of nodes."""
    table = Table(title=f"{title(plan)}: time per step", box=box.SIMPLE_HEAD)
    table.add_column("")
    for nodes in plan.nodes:
        table.add_column(f"{nodes:,} nodes".replace(",", " "), justify="right")
    names = dict.fromkeys(row.name for row in plan.rows)
    for name in names:
        cells = [quantity.seconds(row.prediction.seconds) for row in plan.rows if row.name == name]
        table.add_row(f"[bold]{name}[/]" if name == plan.recommended else name, *cells)
    return table


def details(plan: Plan) -> Table:
    """Return all quantities for the number of nodes that is shown in detail."""
    nodes = f"{plan.at} nodes" if plan.at > 1 else "1 node"
    table = Table(
        title=nodes,
        caption=f"{plan.reason}\n{UNKNOWN}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    table.columns[-1].justify = "left"
    for row in plan.of(plan.at):
        name = f"[bold]{row.name}[/]" if row.name == plan.recommended else row.name
        table.add_row(name, *cells(row, plan.baseline))
    return table


HEADINGS = (
    "per step",
    "x baseline",
    "sent by a node",
    "link busy",
    "extra memory",
    "limited by",
)
MEANINGS = (
    "Mean time of a step on the slowest rank.",
    "Time of a step of the baseline divided by that of the method.",
    "Bytes that leave a node in a step, without headers. 1 MB is 10⁶ bytes.",
    "Share of the step in which a node's link carries bytes.",
    "What the exchange allocates on each rank, beside the model, its gradients and its optimizer.",
    "The largest part of the step.",
)


def cells(row: Row, baseline: str) -> list[str]:
    """Return the cells of a row, below the headings."""
    found = row.prediction
    return [
        quantity.seconds(found.seconds),
        "1×" if row.name == baseline else quantity.times(row.faster),
        quantity.size(found.bytes_per_node),
        quantity.percent(found.wire_share),
        quantity.size(found.memory),
        WORDS[found.parts.limit],
    ]


def title(plan: Plan) -> str:
    """Name the profile and the network."""
    setup = plan.setup
    each = f", {setup.ranks_per_node} ranks per node" if setup.ranks_per_node > 1 else ""
    return (
        f"{setup.profile}, {quantity.rate(int(setup.rate))}, {quantity.seconds(setup.latency)} "
        f"latency{each}"
    )
