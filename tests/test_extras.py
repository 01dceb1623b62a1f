"""Each optional dependency that is missing is named together with the extra that installs it."""

import json
import subprocess
import sys

import pytest

MISSING = {  # what is not installed: an action that needs it, and its extra
    "lightning": ("import offbeat.integrations.lightning", "lightning"),
    "accelerate": ("import offbeat.integrations.accelerate", "accelerate"),
    "transformers": ("import offbeat.integrations.transformers", "transformers"),
    "ray": ("import offbeat.integrations.ray", "ray"),
    "numba": ("import offbeat.hogwild", "hogwild"),
    "sklearn": ("from offbeat.hogwild import AsyncAdamClassifier", "hogwild"),
    "tensorboard": ("import offbeat; offbeat.TensorBoard('.')", "tensorboard"),
    "jinja2": (
        "from offbeat.kit.page import load_template as c; c('offbeat')",
        "report",
    ),
}
SCRIPT = """
import json, sys

class NotInstalled:
    def find_spec(self, name, *_):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
for missing, (action, _) in json.loads(sys.argv[1]).items():
    try:
        exec(action)
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.mark.processes
@pytest.mark.fault("an optional dependency is missing", "ModuleNotFoundError; names the extra")
def test_a_missing_package_is_named_with_its_extra() -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps(MISSING)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert found.stdout.splitlines() == [
        f"{missing} is not installed; run in a clone: pip install '.[{extra}]'"
        for missing, (_, extra) in MISSING.items()
    ], found.stderr
