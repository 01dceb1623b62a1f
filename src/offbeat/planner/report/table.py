"""The tables of a plan in a terminal."""

from collections.abc import Callable

from rich.table import Table

from offbeat.kit import quantity
from offbeat.kit.terminal import figures
from offbeat.plan.recommend import WORDS
from offbeat.plan.result import Plan, Row
from offbeat.plan.worth import SOURCE

UNKNOWN = (
    "A plan knows times and bytes, not convergence. What steps are worth was measured on "
    f"{SOURCE}, with the settings in brackets; offbeat compare measures losses on your script."
)
# The heading of each column, its meaning, and its text.
COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    (
        "per step",
        "Mean time of a step on the slowest rank.",
        lambda row: quantity.seconds(row.prediction.seconds),
    ),
    (
        "x baseline",
        "Time of a step of the baseline divided by that of the method.",
        lambda row: "1×" if row.faster == 1 else quantity.times(row.faster),
    ),
    (
        "steps are worth",
        f"Steps of ddp until a loss divided by those of the method, measured on {SOURCE} with the "
        "settings in brackets.",
        lambda row: "" if row.worth is None else str(row.worth),
    ),
    (
        "speed kept",
        "What all ranks train on in a second, relative to the sum of what each one would without "
        "exchanges and waits.",
        lambda row: quantity.percent(row.prediction.kept),
    ),
    (
        "sent by a node",
        "Bytes that leave a node in a step, without headers. 1 MB is 10⁶ bytes.",
        lambda row: quantity.size(row.prediction.bytes_per_node),
    ),
    (
        "link busy",
        "Share of the step in which a node's link carries bytes.",
        lambda row: quantity.percent(row.prediction.wire_share),
    ),
    (
        "extra memory",
        "What the exchange allocates on each rank, beside the model, its gradients and its "
        "optimizer.",
        lambda row: quantity.size(row.prediction.memory),
    ),
    (
        "limited by",
        "The largest part of the step.",
        lambda row: WORDS[row.prediction.parts.limit],
    ),
)


def overview(plan: Plan) -> Table:
    """Return the time of a step of every method for every number of nodes."""
    heads = [f"{nodes:,} nodes".replace(",", " ") for nodes in plan.nodes]
    found = {
        name: [quantity.seconds(row.prediction.seconds) for row in plan.rows if row.name == name]
        for name in dict.fromkeys(row.name for row in plan.rows)
    }
    rows = [[_name(name, plan), *texts] for name, texts in found.items()]
    return figures(f"{title(plan)}: time per step", heads, rows)


def details(plan: Plan) -> Table:
    """Return all quantities for the number of nodes that is shown in detail."""
    nodes = f"{plan.at} nodes" if plan.at > 1 else "1 node"
    heads = [heading for heading, *_ in COLUMNS]
    rows = [[_name(row.name, plan), *cells(row)] for row in plan.of(plan.at)]
    table = figures(nodes, heads, rows, f"{plan.reason}\n{UNKNOWN}")
    table.columns[-1].justify = "left"
    return table


def cells(row: Row) -> list[str]:
    """Return the cells of a row, below the headings."""
    return [text(row) for *_, text in COLUMNS]


def title(plan: Plan) -> str:
    """Name the profile and the network."""
    setup = plan.setup
    far = "" if setup.sites == "none" else f"; sites of {setup.sites}"
    far += f"; {100 * setup.loss:g} % loss" if setup.loss else ""
    far += f"; {setup.connections} connections" if setup.connections > 1 else ""
    each = f", {setup.ranks_per_node} ranks per node" if setup.ranks_per_node > 1 else ""
    return (
        f"{setup.profile}, {quantity.rate(int(setup.rate))}, {quantity.seconds(setup.latency)} "
        f"latency{each}{far}"
    )


def _name(name: str, plan: Plan) -> str:
    return f"[bold]{name}[/]" if name == plan.recommended else name
