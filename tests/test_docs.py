"""What the documentation says holds: names, code, commands, messages."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from typer.testing import CliRunner

import costs
import offbeat
import public
from offbeat.cli import app
from offbeat.methods import Compressed
from offbeat.testing import ThreadWorld, simulate
from offbeat.transport.world import World
from pages import ROOT, blocks, script
from problems import START, Quadratic, flat, gradient, loss
from ranks import torchrun_forked
from reference.int8 import int8
from test_architecture import FLOORS, SOURCE

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def documented(site: Path) -> set[str]:
    """All names in the site's inventory, as other sites read it to link here."""
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}


@pytest.mark.timeout(300)  # it builds the site: on a busy machine more than the usual two minutes
def test_the_site_has_all_public_names_and_asks_nothing_of_a_network(tmp_path: Path) -> None:
    """Built strictly: a broken link, reference or name is an error."""
    pytest.importorskip("mkdocs", reason="building the site needs the docs extra")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wants = re.compile(r"<(?:script|img|link)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in tmp_path.rglob("*.html"):
        assert not wants.findall(page.read_text("utf-8")), page
    aliases = {  # modules, too
        "offbeat.functional.adasum": "offbeat.functional.adasum.adasum",
        "offbeat.functional.sketch": "offbeat.functional.sketch.sketch",
        "offbeat.functional.top_k": "offbeat.functional.top_k.top_k",
        "offbeat.hogwild.launch": "offbeat.hogwild.launch.launch",
        "offbeat.compare.table": "offbeat.compare.report.table.table",
        "offbeat.plan.predict": "offbeat.plan.predict.predict",
    }
    unimportable = {  # a string, type variables
        "offbeat.__version__",
        "offbeat.transport.handle.Result",
        "offbeat.testing.Result",
    }
    names = {aliases.get(name, name) for name in public.names() - unimportable}
    assert names >= {"offbeat.sgp", "offbeat.Replica.step", "offbeat.testing.simulate"}
    assert not names - documented(tmp_path)


def test_the_listing_of_public_names_is_what_users_may_call() -> None:
    """A change of it is a change of the interface, and a line of CHANGELOG.md."""
    assert public.LISTING.read_text("utf-8") == public.listing(), "run: python tests/public.py"


def test_python_compiles() -> None:
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_shell_is_shell() -> None:
    shown = [(page, block) for page in PAGES for block in blocks(page, "bash")]
    scripts = [*(ROOT / "examples" / "clusters").glob("*.sbatch")]
    assert scripts
    for path, text in [*shown, *((file, file.read_text("utf-8")) for file in scripts)]:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{path}: {done.stderr}"


def test_make_has_every_target_that_is_named() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        code = re.findall(r"`([^`\n]+)`", page.read_text("utf-8")) + blocks(page, "bash")
        named = {n for text in code for n in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)}
        assert named <= targets, page


def test_every_command_is_one() -> None:
    for page in PAGES:
        code = re.findall(r"`(offbeat [^`\n]+)`", page.read_text("utf-8"))
        for block in blocks(page, "bash"):
            code += block.replace("\\\n", " ").splitlines()
        for line in code:
            if line.startswith("offbeat "):
                # With --help all names and options are read, and nothing runs.
                _, command, *words = shlex.split(line, comments=True)
                done = CliRunner().invoke(app, [command, "--help", *words])
                assert done.exit_code == 0, f"{page}: {line}: {done.output}"


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """On the other pages the strict build sees to it."""
    for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        assert "://" in link or (ROOT / link).exists(), link


def test_the_readme_names_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for command in ("make demo", "make test"):
        assert f"`{command}`" in text or command in "".join(blocks(ROOT / "README.md", "bash"))


def test_contributing_shows_the_floors_that_the_tests_assert() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \|([^|]*)\|[^|]*\|$", text, re.MULTILINE)
    shown: dict[int, set[str]] = {}
    for number, cell in rows:
        rooms = {name.removesuffix(".py") for name in re.findall(r"`([\w.]+)`", cell)}
        shown.setdefault(int(number), set()).update(rooms)
    assert shown == {number: set(rooms) for number, rooms in FLOORS.items()}


def test_the_messages_that_the_page_explains_exist() -> None:
    """A title such as **`rank ... is lost`** must be in the source, apart from the dots."""
    said = [
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    titles = re.findall(
        r"\*\*`([^`]+)`\*\*(?! \(from Gloo\))", (ROOT / "docs" / "faq.md").read_text("utf-8")
    )
    assert len(titles) > 20
    for title in titles:
        for part in filter(None, map(str.strip, title.split("..."))):
            assert any(part in text for text in said), f"{title}: {part!r} is nowhere in the source"


def test_the_page_on_faults_shows_what_the_tests_prove() -> None:
    """Collected apart: of this run only a part may be selected."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import faults, json; print(json.dumps(faults.shown(faults.collect())))",
        ],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    proved = json.loads(done.stdout.splitlines()[-1])
    _, after = (ROOT / "docs" / "faults.md").read_text("utf-8").split("<!-- faults -->\n")
    fix = "run: python tests/faults.py --only-table"
    assert after.split("<!-- end -->")[0].strip() == proved, fix
    assert proved.count("\n") >= 60


def test_the_page_on_telemetry_shows_what_stats_returns() -> None:
    """All but the seconds."""

    def worker(world: World) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        for _ in range(3):
            model(torch.ones(3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        stats = replica.stats()
        replica.detach()
        return stats

    (block,) = blocks(ROOT / "docs" / "telemetry.md", "json")
    shown, (found, _) = json.loads(block), ThreadWorld(2).run(worker)
    for part in ("last", "total"):
        for key in found[part].keys() & {"seconds", "seconds_stalled"}:
            found[part][key] = pytest.approx(shown[part][key], abs=1)
    assert shown == found


def test_the_page_on_methods_shows_what_recipes_send_and_hold() -> None:
    page = costs.PAGE.read_text("utf-8")
    assert costs.table(page) in page, "run: python tests/costs.py"


METHODS = sorted({*(ROOT / "docs" / "methods").glob("*.md")} - {costs.PAGE})


@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.stem)
def test_the_first_snippet_of_a_method_trains(page: Path) -> None:
    if page.stem == "hogwild":
        pytest.skip("starts processes; tests/hogwild and the demo run the same script")
    snippet = blocks(page, "python")[0]

    def worker(world: World) -> list[torch.Tensor]:
        model = torch.nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.01)
        attach = partial(offbeat.replicate, mesh=world)
        library = SimpleNamespace(**{**vars(offbeat), "replicate": attach})
        names = {"offbeat": library, "model": model, "optimizer": optimizer}
        exec(compile(snippet, page.name, "exec"), names)
        replica: Any = names["replica"]
        for _ in range(2):
            model(torch.ones(3)).sum().backward()
            replica.report_loss(0.0)
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.finish()
        replica.detach()
        return [parameter.detach() for parameter in model.parameters()]

    first, *others = ThreadWorld(nodes=((0, 1), (2, 3))).run(worker)
    assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("page", ["testing.md", "data.md"])
def test_the_page_runs(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": page}
    for block in blocks(ROOT / "docs" / page, "python"):
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("listing", ["Neighbours", "Int8"])
def test_the_listings_follow_their_references(listing: str, size: int) -> None:
    shown: dict[str, Any] = {"__name__": "contributing"}
    for block in blocks(ROOT / "CONTRIBUTING.md", "python"):
        exec(compile(block, "CONTRIBUTING.md", "exec"), shown)
    algorithm, reference = {
        "Neighbours": lambda: (
            offbeat.Algorithm(parameters=shown["Neighbours"]()),
            shown["neighbours"],
        ),
        "Int8": lambda: (offbeat.Algorithm(Compressed(compressor=shown["Int8"])), int8),
    }[listing]()
    runs = simulate(
        algorithm,
        Quadratic,
        loss,
        steps=12,
        size=size,
        optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    )
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    nodes = tuple((rank,) for rank in range(size))
    theirs = reference(START, gradient, nodes=nodes, steps=12, lr=0.1, momentum=0.9)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_compressor_takes_35_lines_at_most() -> None:
    listing = next(b for b in blocks(ROOT / "CONTRIBUTING.md", "python") if "class Int8" in b)
    assert listing.count("\n") <= 35


def test_schedules_of_the_learning_rate_work_beside_those_of_daso() -> None:
    """The loss comes to rest: B and W halve, and the rate does, on all ranks alike."""
    names: dict[str, Any] = {}
    exec(script("docs/methods/daso.md", "daso_schedule.py"), names)
    torch.manual_seed(0)  # not in the threads, which draw from one generator
    start = torch.nn.Linear(1, 1).double()

    def worker(world: World) -> tuple[list[float], float, int]:
        random = torch.Generator().manual_seed(world.rank)
        x, noise = torch.randn(2, 10, 16, 1, generator=random, dtype=torch.float64)
        batches = [(a, 3 * a + b) for a, b in zip(x, noise, strict=True)]
        held_out = torch.linspace(-1, 1, 32, dtype=torch.float64).unsqueeze(1)
        seen = []

        def held_out_loss(model: torch.nn.Module) -> float:
            seen.append(torch.nn.functional.mse_loss(model(held_out), 3 * held_out).item())
            return seen[-1]

        replica, optimizer = names["train"](
            deepcopy(start),
            batches,
            30,
            torch.nn.functional.mse_loss,
            held_out_loss,
            world,
        )
        assert replica.consensus_distance()["max"] == 0
        replica.detach()
        return seen, optimizer.param_groups[0]["lr"], replica.parameters.cadence.every

    (losses, rate, every), *others = ThreadWorld(nodes=((0, 1), (2, 3))).run(worker)
    assert all(other == (losses, rate, every) for other in others)
    assert losses[-1] < losses[0] / 10
    assert every < 8
    halved = np.log2(0.1 / rate)  # the warm-up, from a tenth of it, is over
    assert halved >= 1
    assert halved == pytest.approx(round(halved), abs=1e-9)


def test_the_readme_shows_what_was_measured() -> None:
    """Columns: method, step, bytes, and the losses."""
    path = ROOT / "bench" / "results" / "outer" / "methods.json"
    found = [(row[0], row[1], row[3], *row[5:]) for row in json.loads(path.read_text())["rows"]]
    text = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(
        r"^\| `(.*)` \| (.* s) \| (.*) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert len(rows) == 5
    assert set(rows) <= set(found)


@pytest.mark.processes
@pytest.mark.timeout(240)  # starts the workers twice
def test_a_run_resumes_from_the_newest_step_that_all_ranks_have(tmp_path: Path) -> None:
    path = tmp_path / "resume.py"
    path.write_text(script("docs/saving.md", "resume.py"))
    torchrun_forked(2, path, logs=tmp_path / "logs")
    folder = tmp_path / "checkpoints"
    kept = sorted(file.name for file in folder.iterdir())
    assert kept == [f"offbeat-save6-rank{rank}-of-2.pt" for rank in (0, 1)]
    (folder / "offbeat-save7-rank1-of-2.pt").touch()  # as if rank 0 had died while saving
    assert "300 steps were done before" in torchrun_forked(2, path, logs=tmp_path / "again")


@pytest.mark.processes
@pytest.mark.fault(
    "SIGTERM to one rank that saves by a flag",
    "all ranks save after the same step",
    group="Checkpoints",
)
def test_a_run_that_is_ended_saves_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "preempt.py"
    start, _, rest = script("docs/saving.md", "resume.py").partition("for step in range(")
    _, body, _, _ = re.split(r"301\):\n|    replica.step\(\)\n|replica.finish", rest)
    signalled = "    if (step, rank) == (33, 1):\n        signal.raise_signal(signal.SIGTERM)\n"
    shown = script("docs/saving.md", "preempt.py")
    path.write_text(start + re.sub(r"    \.\.\..*\n", lambda _: body + signalled, shown))
    torchrun_forked(2, path, logs=tmp_path / "logs")
    kept = sorted(file.name for file in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"offbeat-save1-rank{rank}-of-2.pt" for rank in (0, 1)]


DCP = """
replica.detach()  # nothing has been trained yet; `fresh` makes everything anew


def fresh():
    global model, optimizer, replica
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = offbeat.replicate(model, offbeat.sgp("ring"))


def train(seed):
    torch.manual_seed(100 * seed + rank)
    for _ in range(5):
        model(torch.rand(8, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    return [p.detach().clone() for p in model.parameters()]


fresh()
train(1)
save("folder")
expected = train(2)
replica.detach()
fresh()
load("folder")
assert all(map(torch.equal, train(2), expected))
replica.detach()
"""


@pytest.mark.processes
def test_the_functions_for_distributed_checkpoint_go_on_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "dcp.py"
    setup, _ = script("docs/saving.md", "resume.py").split("\nparts =")
    functions = next(b for b in blocks(ROOT / "docs" / "saving.md", "python") if "dcp.save" in b)
    path.write_text(setup + "\n" + functions + DCP)
    torchrun_forked(2, path, logs=tmp_path / "logs")
