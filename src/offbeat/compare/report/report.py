"""The HTML report: one self-contained file, with a light and a dark colour scheme."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.compare.report import page
from offbeat.compare.report.column import columns
from offbeat.compare.report.table import title
from offbeat.compare.report.timeline import Timeline
from offbeat.compare.result import Comparison
from offbeat.extras import extra

if TYPE_CHECKING:
    from jinja2 import Template


def write_report(comparison: Comparison, timelines: Sequence[Timeline], path: Path) -> None:
    """Render the report to ``path``."""
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
    """Compile the template of the report; raises ModuleNotFoundError without jinja2."""
    return compile_template(_resource("report.html.j2"))


def compile_template(text: str) -> "Template":
    """Compile the text of a template; raises ModuleNotFoundError without jinja2."""
    with extra("report"):
        from jinja2 import Environment, StrictUndefined
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def _resource(name: str) -> str:
    return (files("offbeat.compare.report") / name).read_text(encoding="utf-8")
