"""The command ``offbeat``: outside of the package, since importing that imports torch."""

import os
import signal


def main() -> None:
    """Run the command line; Ctrl-C ends the program quietly also while it is imported."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not of a job that ignores Ctrl-C
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from offbeat.cli import app

    signal.signal(signal.SIGINT, before)
    app()
