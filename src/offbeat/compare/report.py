"""The HTML report: one self-contained file, with a light and a dark colour scheme."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.compare import page
from offbeat.compare.column import columns
from offbeat.compare.result import Comparison
from offbeat.compare.table import title
from offbeat.compare.timeline import Timeline

if TYPE_CHECKING:
    from jinja2 import Template


def write_report(comparison: Comparison, timelines: Sequence[Timeline], path: Path) -> None:
    """Render the report to ``path``; raises ValueError if jinja2 is not installed."""
    text = load_template().render(
        title=title(comparison),
        comparison=comparison,
        results=comparison.results,
        colours=page.colours(comparison),
        facts=page.facts(comparison),
        tiles=page.tiles(comparison),
        columns=columns(comparison),
        bar_panels=page.bar_panels(comparison),
        over_time=page.loss_chart(comparison, lambda point: point.seconds, "seconds"),
        over_steps=page.loss_chart(comparison, lambda point: point.step, "steps"),
        timeline_chart=page.timeline_chart(timelines),
        style=_resource("report.css"),
    )
    path.write_text(text, encoding="utf-8")


def load_template() -> "Template":
    """Compile the template of the report; raises ValueError if jinja2 is not installed."""
    return compile_template(_resource("report.html.j2"))


def compile_template(text: str) -> "Template":
    """Compile the text of a template; raises ValueError if jinja2 is not installed."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ValueError(
            "the report needs jinja2, which is not installed; run: pip install 'offbeat[report]', "
            "or skip the report with --no-report"
        ) from error
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def _resource(name: str) -> str:
    return (files("offbeat.compare") / name).read_text(encoding="utf-8")
