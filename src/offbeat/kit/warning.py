"""Warnings that name the line of the user, however deep in the package they are raised."""

import inspect
import warnings
from pathlib import Path

import torch

# Hooks of an optimizer lie between the user and the replica.
_PACKAGES = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], *torch.__path__))


def warn(text: str) -> None:
    """Give a ``RuntimeWarning`` at the innermost line outside of offbeat and torch."""
    frame, depth = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, RuntimeWarning, stacklevel=depth)
