"""The command line: recipes, check and the help texts."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import offbeat
from offbeat.cli import app
from offbeat.recipes import RECIPES

SOURCE = Path(offbeat.__file__).parent.parent


def offbeat_command(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_help_of_every_command_is_shown_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    program = """
from typer.testing import CliRunner
from offbeat.cli import app
names = [command.name or command.callback.__name__ for command in app.registered_commands]
for words in ["--help"], ["--version"], *([name, "--help"] for name in names):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output)
"""
    done = run("-c", program, path=f"{tmp_path}:{SOURCE}")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("-m", "offbeat", "--help")
    assert all(command in done.stdout for command in ("recipes", "check"))


def test_nothing_but_offbeat_is_imported_beside_torch() -> None:
    """The rest is of the standard library: an import takes 0.15 s at most beside that of torch."""
    program = (
        "import sys, torch; before = {*sys.modules}; import offbeat; offbeat.replicate\n"
        "print(*{name.split('.')[0].strip('_') for name in {*sys.modules} - before})"
    )
    done = run("-c", program)
    assert {*done.stdout.split()} - sys.stdlib_module_names == {"offbeat"}, done.stderr


def run(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path or str(SOURCE)},
    )


@pytest.mark.fault("Ctrl-C while the offbeat command imports torch", "exit code 130; no traceback")
def test_an_interrupt_while_torch_is_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "print('importing', flush=True)\nimport time\ntime.sleep(60)"
    )
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["offbeat"].split(":")
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # in any job
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{heard}; import sys; sys.argv = ['offbeat', 'recipes']\n"
            f"from {module} import {function}; {function}()",
        ],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "importing\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=30) == ("", "")
    assert command.returncode == 130


def test_version() -> None:
    assert offbeat_command("--version").output.strip() == offbeat.__version__


def test_every_recipe_is_listed_and_accepted_without_arguments() -> None:
    listed = json.loads(offbeat_command("recipes", "--json").output)
    names = [recipe["name"] for recipe in listed]
    assert names == [*(recipe.__name__ for recipe in RECIPES), "auto"]
    for name in names:
        assert isinstance(offbeat.algorithm(name), offbeat.Algorithm)
        assert name in offbeat_command("recipes").output


def test_check_prints_the_exchanges_of_an_algorithm() -> None:
    done = offbeat_command("check", "local_sgd(every=4)")
    assert done.exit_code == 0
    assert "Average(every=4, over='world', nonfinite='raise')" in done.output


@pytest.mark.parametrize(
    "text",
    ["nothing", "sgp(hops=3)", "sgp(1 + 1)", "sgp(", "", "ddp()()", "auto(candidates=['nothing'])"],
)
def test_check_refuses_with_exit_code_2_and_one_sentence(text: str) -> None:
    done = offbeat_command("check", text)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert done.output.strip()
