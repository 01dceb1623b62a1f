"""What the tests of all frameworks share."""

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from killed_and_joined import found_in, run

from ranks import fork_server, torchrun_forked

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "integrations"
# Imported once for all ranks of a host, if these tests are the first to start processes.
IMPORTED = {
    "accelerate": "accelerate",
    "lightning": "lightning.pytorch",
    "transformers": "transformers.trainer",
}

Cases = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """What each of two ranks found, by the name of the case."""
    return _found(request, tmp_path_factory, workers=2)


@pytest.fixture(scope="module")
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """What each of three ranks found, which have 100, 70 and 31 batches."""
    return _found(request, tmp_path_factory, workers=3)


def _found(request: pytest.FixtureRequest, paths: pytest.TempPathFactory, workers: int) -> Cases:
    """Run the cases for so many ranks at once, since imports take seconds.

    ``test_<host>.py`` starts ``<host>_cases.py`` with a folder and the script of the page on that
    host, which is written to the folder.
    """
    host = request.module.__name__.removeprefix("test_")
    fork_server(IMPORTED[host])
    page = (PAGES / f"{host}.md").read_text("utf-8")
    ((script, name),) = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page, re.DOTALL)
    path = paths.mktemp(host) / name
    path.write_text(script)
    cases, logs = HERE / f"{host}_cases.py", paths.mktemp("logs")
    output = torchrun_forked(workers, cases, str(path.parent), str(path), logs=logs)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line["ranks"] for line in lines}


@pytest.fixture
def killed_and_joined(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """What the two survivors and the newcomer of ``<host>_elastic_cases.py`` found.

    Whatever the framework, all of "alike" is the same on the three, bit for bit.
    """
    host = request.module.__name__.removeprefix("test_")
    process = fork_server().Process(target=run, args=(host, tmp_path))
    process.start()
    try:
        process.join(timeout=130)
    finally:
        with suppress(ProcessLookupError):  # its workers and the store, if it hangs
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
    found = found_in(tmp_path)
    assert len(found) == 3
    for rank in found:
        assert rank["alike"] == found[0]["alike"]
        assert rank["lost"] == [0]
        assert len(rank["joined"]) == 1
    return found
