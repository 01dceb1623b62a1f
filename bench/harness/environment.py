"""The environment of the processes of a bench."""

import os

from bench.harness.files import ROOT


def environment(gpu: bool = False) -> dict[str, str]:
    """What processes need beside the caller's environment: the path of the benches, and no GPU.

    Most benches measure the network between nodes, which GPUs of one machine would bypass; with
    ``gpu`` all processes see the caller's.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return hidden | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
