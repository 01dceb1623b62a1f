"""The tutorial: its script and all commands in their order, on two nodes with faster links."""

import os
import re
import shlex
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

import notebook
from offbeat.cli import app
from offbeat.lab import Kill, Lab, Unavailable
from offbeat.lab.faults import RunControl
from pages import blocks, script
from ranks import torchrun_forked

CHEAPER = {
    "ddp,sgp(overlap=1,wire='bf16'),": "",  # ddp runs in the lab, and sgp is checked
    "--nodes 4 --rate 100mbit": "--nodes 2 --rate 1gbit",
    "--kill 3@30s": "--kill 1@30s",
    "--nodes 4,64,1024": "--nodes 4,8",
    "--steps 40": "--steps 20",
    "--steps 100": "--steps 30",
}
# What each command prints, in the order of the page.
PRINTED = [
    "backends.*gloo",
    "step 40: loss",
    "step 40: loss",
    r"\[0\] step 40: loss",
    r"PushSum\(.*overlap=1",
    r"diloco\(every=10\) +[\d.]+ m?s",
    "PeerLost: rank 1 is lost",
    r"\[0\] step 30: loss",
    "On 8 nodes at 1 Gbit/s, use",
]


def commands() -> list[str]:
    """The commands of the page, but those for machines of the reader's."""
    shown = "".join(blocks(notebook.PAGE, "bash")).replace("\\\n", " ")
    return [line for line in shown.splitlines() if "node0" not in line]


class Tutorial:
    """Runs commands in a folder; a kill comes once the ranks train, however long they start."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write the script."""
        self.folder, self.trains, self.lines = folder, threading.Event(), list[str]()
        (folder / "train.py").write_text(script("docs/tutorial.md", "train.py"))
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.setattr("offbeat.cli.lab.line_printer", lambda: self.note)
        monkeypatch.setattr(Kill, "inject", self.inject)

    def note(self, rank: int | None, line: str) -> None:
        """Keep a line that the lab would print."""
        self.lines.append(f"[{rank}] {line}")
        if "step 10" in line:
            self.trains.set()

    def inject(self, control: RunControl, stop: threading.Event) -> None:
        """Kill rank 1 once it has trained for ten steps, or not if the run ends before."""
        while not self.trains.wait(0.1):
            if stop.is_set():
                return
        control.kill(1)

    def run(self, command: str) -> tuple[int, str]:
        """Return the exit code and all output."""
        for dear, cheap in CHEAPER.items():
            command = command.replace(dear, cheap)
        program, *words = shlex.split(command, comments=True)
        if program == "torchrun":
            logs = self.folder / f"logs {words}"
            assert words[:2] == ["--standalone", "--nproc-per-node"]
            return 0, torchrun_forked(int(words[2]), self.folder / words[3], *words[4:], logs=logs)
        self.trains.clear()
        self.lines.clear()
        done = CliRunner().invoke(app, words)
        return done.exit_code, "\n".join([done.output, *self.lines])


def test_the_notebook_is_the_tutorial() -> None:
    fix = "run: python tests/notebook.py"
    assert notebook.NOTEBOOK.read_text("utf-8") == notebook.notebook(), fix


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_all_commands_of_the_tutorial_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with Lab(1, rate="1gbit"):
            pass
    except Unavailable as error:
        pytest.skip(str(error))
    tutorial = Tutorial(tmp_path, monkeypatch)
    for command, printed in zip(commands(), PRINTED, strict=True):
        code, output = tutorial.run(command)
        assert re.search(printed, output), f"{command}\n{output}"
        assert (code != 0) == ("# fails" in command), f"{command}\n{output}"
        losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
        assert losses[-1:] <= losses[:1], f"{command}: nothing was learned\n{output}"
