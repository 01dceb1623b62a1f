"""What would be uploaded: an sdist and a wheel, built from a commit with a tag."""

import email
import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from pages import ROOT, blocks
from ranks import torchrun

TAG, VERSION = "v98.7.6", "98.7.6"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the version is that of a tag"),
]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, *targets: str) -> dict[str, bytes]:
    words = [word for target in targets for word in ("-t", target)]
    run(sys.executable, "-m", "hatchling", "build", *words, "-d", "out", cwd=source)
    return {path.name: path.read_bytes() for path in (source / "out").iterdir()}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a clone in which both were built."""
    for tool in ("hatchling", "hatch_vcs"):
        pytest.importorskip(tool, reason="building needs the dev extra")
    clone = tmp_path_factory.mktemp("release") / "first"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, clone)
    run("git", "tag", TAG, cwd=clone)
    build(clone, "sdist", "wheel")
    return clone / "out"


def test_two_builds_are_equal_and_the_sdist_builds_the_wheel(artifacts: Path) -> None:
    first = {path.name: path.read_bytes() for path in artifacts.iterdir()}
    wheel, sdist = f"offbeat-{VERSION}-py3-none-any.whl", f"offbeat-{VERSION}.tar.gz"
    assert first.keys() == {wheel, sdist}
    second = artifacts.parent.with_name("second")
    run("git", "clone", "--quiet", artifacts.parent, second)
    assert build(second, "sdist", "wheel") == first
    run("tar", "-xzf", artifacts / sdist, "-C", second)
    assert build(second / f"offbeat-{VERSION}", "wheel") == {wheel: first[wheel]}


def test_an_index_would_take_them_and_show_no_dead_link(artifacts: Path) -> None:
    for tool in ("twine", "check_wheel_contents"):
        pytest.importorskip(tool, reason="checking needs the dev extra")
    run(sys.executable, "-m", "twine", "check", "--strict", *artifacts.iterdir())
    (wheel,) = artifacts.glob("*.whl")
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    with ZipFile(wheel) as archive:
        metadata = archive.read(f"offbeat-{VERSION}.dist-info/METADATA").decode()
    text = str(email.message_from_string(metadata).get_payload())
    assert "replica.step()" in text
    assert not re.findall(r"\]\((?!https?://)", text)


def test_links_follow_from_the_one_setting_of_addresses(artifacts: Path) -> None:
    mkdocs = pytest.importorskip("mkdocs.config", reason="the site needs the docs extra")
    clone = artifacts.parent.with_name("published")
    run("git", "clone", "--quiet", artifacts.parent, clone)
    project, source = clone / "pyproject.toml", "https://github.com/someone/offbeat"
    urls = f"[project.urls]\nSource = '{source}'\nDocumentation = 'https://some.one'\n"
    project.write_text(project.read_text().replace("[project.urls]\n", urls))
    shown = json.loads(run(sys.executable, "-m", "hatchling", "metadata", cwd=clone))
    assert shown["urls"]["Source"] == source
    text = shown["readme"]["text"]
    assert f"[CONTRIBUTING]({source}/blob/main/CONTRIBUTING.md)" in text
    assert f"({source}/raw/main/docs/assets/demo.png)" in text
    assert not re.findall(r"\]\((?!https?://)", text)
    config = mkdocs.load_config(str(clone / "mkdocs.yml"))
    config = config.plugins.on_config(config)
    assert config.site_url == "https://some.one/"
    assert config.edit_uri == f"{source}/edit/main/docs/"


def test_the_citation_is_of_the_last_release() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    released = re.findall(r"^## \[([\d.]+)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert (cited["version"], str(cited["date-released"])) == released[0]
    assert cited["cff-version"] == "1.2.0"
    for work in (cited, *cited["references"]):
        assert {"title", "type", "authors"} <= work.keys()
        assert all(author.keys() & {"name", "family-names"} for author in work["authors"])


def test_the_templates_and_hooks_are_well_formed() -> None:
    yaml = pytest.importorskip("yaml")
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"):
        _, header, _ = template.read_text("utf-8").split("---\n")
        assert yaml.safe_load(header).keys() == {"name", "about"}
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in hooks["hooks"]:  # of the environment that `make setup` makes
        assert (Path(sys.executable).parent / Path(hook["entry"].split()[0]).name).exists()


def without(mark: str, diff: str) -> str:
    """One side of a diff: the lines but those with ``mark``, their first column removed."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(mark))


@pytest.mark.timeout(240)  # compiles the kernels of an installation that has none yet
def test_the_wheel_alone_runs_the_readme(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of the diff learn. Torch and other dependencies are lent by this environment."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "env")
    binaries = tmp_path / "env" / "bin"
    python = str(binaries / "python")
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (wheel,) = artifacts.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run(*pip, "--no-index", wheel)
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "lent.pth").write_text("\n".join(lent))

    program = binaries / "offbeat"
    assert run(program, "--version", cwd=tmp_path).strip() == VERSION
    assert "compare" in run(program, "--help", cwd=tmp_path)
    assert "PushSum(" in run(program, "check", "sgp(overlap=1)", cwd=tmp_path)
    (diff,) = blocks(ROOT / "README.md", "diff")
    plain: dict[str, Any] = {}
    exec(without("+", diff), plain)
    path = tmp_path / "train.py"
    ends = "\nreplica.finish()\nprint(f'loss {loss.item()}', offbeat)\nreplica.detach()\n"
    path.write_text(without("-", diff) + ends)
    said = torchrun(2, path, python=python)
    assert said.count(str(packages)) == 2
    losses = [float(number) for number in re.findall(r"loss ([\d.e-]+)", said)]
    assert len(losses) == 2
    assert max(*losses, plain["loss"].item()) < 0.01  # that of the untrained model is about 0.1
