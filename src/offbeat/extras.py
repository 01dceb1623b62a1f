"""The extras of the package: sets of optional dependencies that pip installs by a name."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import modules of the extra ``name`` inside the block; say how to install a missing one.

    >>> with extra("graphs"):
    ...     import nowhere
    Traceback (most recent call last):
    ModuleNotFoundError: nowhere is not installed; run in a clone: pip install '.[graphs]'
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        fix = f"{missing.name} is not installed; run in a clone: pip install '.[{name}]'"
        raise ModuleNotFoundError(fix, name=missing.name) from missing
