"""The HTML report of a plan: one self-contained file, in the style of ``offbeat compare``."""

from importlib.resources import files
from pathlib import Path

from offbeat.compare.report.report import compile_template
from offbeat.plan.question import WinMap
from offbeat.plan.report import page
from offbeat.plan.report.table import HEADINGS, MEANINGS, UNKNOWN, cells, title
from offbeat.plan.result import Plan


def write_report(plan: Plan, winners: WinMap, path: Path) -> None:
    """Render the report to ``path``.

    Raises ``ModuleNotFoundError`` without jinja2, ``ValueError`` if the file cannot be written.
    """
    text = compile_template(
        (files("offbeat.plan.report") / "report.html.j2").read_text("utf-8")
    ).render(
        title=title(plan),
        plan=plan,
        colours=page.colours(plan),
        facts=page.facts(plan),
        tiles=page.tiles(plan),
        headings=list(zip(HEADINGS, MEANINGS, strict=True)),
        rows=[(row.name, cells(row, plan.baseline)) for row in plan.of(plan.at)],
        over_nodes=page.nodes_chart(plan),
        bars=page.stacked_bars(plan),
        map=page.map_rows(plan, winners),
        unknown=UNKNOWN,
        style=(files("offbeat.compare.report") / "report.css").read_text("utf-8"),
        own_style=(files("offbeat.plan.report") / "report.css").read_text("utf-8"),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"report: got {str(path)!r}, which cannot be written ({error.strerror}); pass a path "
            "in a folder that exists"
        ) from error
