"""Resident memory of this process."""

import ctypes
import gc
from pathlib import Path

M_MMAP_THRESHOLD = -3  # of mallopt


def resident(key: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most since :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def forget_peak() -> None:
    """Return free memory to the system, and start counting the peak anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def return_large_tensors() -> None:
    """Let the memory of large tensors return to the system as soon as they are gone."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
