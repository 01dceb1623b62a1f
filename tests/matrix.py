"""The suite with other versions of Python and torch: ``make test-matrix``.

Each pair gets an environment of its own in ``.matrix``, with the CPU build of torch; a pair whose
Python is not on this machine is left out. What passed becomes rows of docs/index.md, with the date.
A pair may be followed by an extra, as in ``3.11-2.13.0-ray``: then only that extra is installed,
and its tests, which run its page, are the part.
"""

import argparse
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "index.md"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
# The oldest, a middle and the newest torch; the oldest and newest Python with the middle one.
PAIRS = ("3.11-2.10.0", "3.11-2.13.0", "3.11-2.15.0", "3.12-2.13.0", "3.13-2.13.0")
PART = ["reference", "functional", "topology", "transport", "attach", "replica", "test_contract.py"]
EXTRAS = {
    "fast": ["functional"],
    "hogwild": ["hogwild"],
    "report": ["compare/test_report.py"],
    "graphs": ["topology"],
    "tensorboard": ["telemetry"],
    "lightning": ["integrations/test_lightning.py"],
    "accelerate": ["integrations/test_accelerate.py"],
    "transformers": ["integrations/test_transformers.py"],
    "ray": ["integrations/test_ray.py"],
    "bench": ["bench"],
    "demo": ["test_examples.py"],
}
DATA = {"ray": ["scikit-learn"]}  # of the example on its page
ALONE = [f"3.11-2.13.0-{extra}" for extra in EXTRAS]
PACKAGES = ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis"]
ROW = re.compile(r"^\| `make test-matrix`: .*\n", re.MULTILINE)


def interpreter(version: str) -> str | None:
    """Return the path of a Python, also of one that pyenv has but does not use."""
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def environment(pair: str) -> Path | None:
    """Return the Python of the pair's environment, made if there is none; None without Python."""
    folder = ROOT / ".matrix" / pair
    python, (version, torch, *extra) = folder / "bin" / "python", pair.split("-")
    if not python.exists():
        if (found := interpreter(version)) is None:
            return None
        subprocess.run([found, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--extra-index-url", CPU_BUILDS, f"torch=={torch}"], check=True)
        more = [f"{ROOT}[fast]", "scipy"]
        if extra:
            more = [f"{ROOT}[{extra[0]}]", *DATA.get(extra[0], [])]
        subprocess.run([*pip, *PACKAGES, "-e", *more], check=True)
    return python


def passed(python: Path, part: Sequence[str]) -> int | None:
    """Return the number of tests that passed; None if one failed."""
    tests = [ROOT / "tests" / name for name in part]
    command = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not quiet and not gpu", *tests]
    output = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout or ():
            print(line, end="", flush=True)
            output.append(line)
    found = re.search(r"(\d+) passed", output[-1])
    return int(found[1]) if found and run.returncode == 0 else None


def write(rows: Sequence[str]) -> None:
    """Replace the rows of the same pairs in the page."""
    text = PAGE.read_text("utf-8")
    done = {_subject(row) for row in rows}
    kept = [row for row in ROW.findall(text) if _subject(row) not in done]
    place = re.search(ROW, text)
    assert place is not None, "the table of the page has lost its rows of the matrix"
    start = place.start()
    PAGE.write_text(text[:start] + "".join(sorted([*kept, *rows])) + ROW.sub("", text[start:]))


def _subject(row: str) -> tuple[str, ...]:
    """What two runs of the matrix have in common, if the later one replaces the row."""
    _, what, *pair = row.split("|")[:4]
    return (*pair, "alone" if "alone" in what else "")


def main() -> None:
    """Run the tests with all pairs, or those given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", default=[*PAIRS, *ALONE], metavar="PYTHON-TORCH")
    parser.add_argument("--whole", action="store_true", help="all tests, not a part of them")
    given = parser.parse_args()
    rows, failed, alone = [], [], []
    for pair in given.pairs:
        print(f"{pair}:", flush=True)
        version, _, *extra = pair.split("-")
        part = [""] if given.whole else EXTRAS[extra[0]] if extra else PART
        if (python := environment(pair)) is None:
            print(f"  no Python {version} on this machine")
        elif (count := passed(python, part)) is None:
            failed.append(pair)
        else:
            asked = [python, "-c", "import torch; print(torch.__version__)"]
            build = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
            where = f"{version} | {build} | {date.today()} |\n"
            if extra:
                alone += extra
                rows = rows[:-1] if "alone" in "".join(rows[-1:]) else rows
            what = f"each of {', '.join(alone)} alone" if extra else f"{count:,} tests"
            rows.append(f"| `make test-matrix`: {what} | {where}")
    write(rows)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
