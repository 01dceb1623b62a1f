"""What the server of pytest-xdist's workers does once, before it forks them: collect the tests.

Eight workers on two cores would each import torch and every test module, for most of a minute.
"""

import json
import os
from contextlib import redirect_stdout

import pytest

import preloaded

with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
    # Workers collect again, and find the modules imported; they report what fails.
    pytest.main([*json.loads(os.environ.pop("COLLECTED")), "--collect-only"])

preloaded.require_one_thread()
