"""The environment of the processes of a bench."""

import os

from bench.harness.files import ROOT


def environment() -> dict[str, str]:
    """What processes need beside the caller's environment: the path of the benches, and no GPU.

    Benches measure the network between nodes, which GPUs of one machine would bypass.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
