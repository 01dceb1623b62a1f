"""The checks of one machine: versions, devices, optional packages, and the lab."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from offbeat.doctor.finding import Finding
from offbeat.lab import Lab, Unavailable
from offbeat.platform import privates
from offbeat.platform.device import accelerators
from offbeat.platform.process_group import available_backends
from offbeat.version import __version__

PYTHONS = ("3.11", "3.12", "3.13")  # the suite was run with these


def machine() -> Iterator[Finding]:
    """Check versions, backends, devices and optional packages."""
    yield Finding("offbeat", "ok", f"{__version__} on {platform.platform()}")
    python = platform.python_version()
    yield _tested("Python", python, is_tested=python.rpartition(".")[0] in PYTHONS)
    yield _tested("torch", torch.__version__, is_tested=privates.is_tested(torch.__version__))
    yield _backends()
    yield _devices()
    yield _optional("numba", "compiled passes on CPUs", "pip install '.[fast]'")
    if accelerators():
        yield _optional("triton", "kernels on GPUs", "pip install triton")


def lab() -> Finding:
    """Check whether networks can be emulated here, by emulating one."""
    try:
        with Lab(2, rate="1gbit", latency="10ms"):
            return Finding("lab", "ok", "emulated networks with limited rates and latency")
    except (Unavailable, OSError) as error:
        return Finding("lab", "note", "networks cannot be emulated here", str(error))


def _tested(name: str, found: str, is_tested: bool) -> Finding:
    if is_tested:
        return Finding(name, "ok", found)
    return Finding(
        name,
        "warning",
        f"{found}, with which offbeat was not tested",
        "if training fails, try a version that docs/index.md lists, and report the failure",
    )


def _backends() -> Finding:
    found = available_backends()
    if "gloo" in found:
        return Finding("backends", "ok", ", ".join(found))
    text = f"no Gloo, only {', '.join(found) or 'none'}"
    return Finding("backends", "error", text, "install a torch that was built with Gloo")


def _devices() -> Finding:
    found = accelerators()
    if not found:
        return Finding("devices", "ok", "CPU")
    fix = "offbeat was not tested on accelerators: please report what works"
    return Finding("devices", "note", ", ".join(found), fix)


def _optional(package: str, use: str, fix: str) -> Finding:
    if find_spec(package) is None:
        return Finding(package, "note", f"not installed; offbeat uses it for {use}", fix)
    try:
        return Finding(package, "ok", version(package))
    except PackageNotFoundError:
        return Finding(package, "ok", "installed")
