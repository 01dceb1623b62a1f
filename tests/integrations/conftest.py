"""What the tests of all frameworks share."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ranks import torchrun

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "integrations"


@pytest.fixture(scope="module")
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks found, by the name of the case.

    ``test_<host>.py`` starts ``<host>_cases.py`` once, since imports take seconds, with a folder
    and the script of the page on that host, which is written to the folder.
    """
    host = request.module.__name__.removeprefix("test_")
    page = (PAGES / f"{host}.md").read_text("utf-8")
    ((script, name),) = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page, re.DOTALL)
    path = tmp_path_factory.mktemp(host) / name
    path.write_text(script)
    output = torchrun(2, HERE / f"{host}_cases.py", str(path.parent), str(path))
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line["ranks"] for line in lines}
