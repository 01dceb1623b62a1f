"""Where messages are allocated, by the backends of a group."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from offbeat.transport.group import Group, message_device

GLOO = {"cpu": "gloo", "cuda": "gloo"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}
NCCL = {"cuda": "nccl"}


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        (GLOO, "cpu", "cpu"),
        (GLOO, "cuda:1", "cpu"),
        (BOTH, "cpu", "cpu"),
        (BOTH, "cuda:1", "cuda:1"),
        (NCCL, "cuda:1", "cuda:1"),
        (NCCL, "cpu", "cuda:3"),  # nothing else can carry what is on the host
        (BOTH, "mps", "cpu"),
    ],
)
def test_messages_are_where_a_backend_sends_them(
    backends: dict[str, str], device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    found = SimpleNamespace(backend=lambda d: backends.get(torch.device(d).type, ""))
    assert message_device(cast(Group, found), device) == torch.device(expected)
