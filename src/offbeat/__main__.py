"""Entry point of ``python -m offbeat``."""

from offbeat.cli import app

app(prog_name="offbeat")
