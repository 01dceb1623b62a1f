"""The states of registered objects in the state of a replica."""

import json
from collections.abc import Mapping
from typing import Any

from offbeat.transport.group import Group
from offbeat.transport.small_gathers import raise_alike


def load_registered(
    registered: Mapping[str, Any], texts: Mapping[str, str], control: Group | None
) -> dict[str, Any]:
    """Load states, as JSON by name, on all ranks or on none; return those of no object here."""
    states, before, fault = dict[str, Any](), dict[str, str](), None
    try:
        states |= {name: json.loads(text) for name, text in texts.items()}
        for name in filter(registered.__contains__, states):
            before[name] = json.dumps(registered[name].state_dict())
            registered[name].load_state_dict(states[name])
    except Exception as error:  # the caller's code may raise anything, and the others wait
        fault = f"cannot load a registered state: {error!r}"
    try:
        raise_alike(fault, control)
    except Exception:
        for name, text in before.items():
            registered[name].load_state_dict(json.loads(text))
        raise
    return {name: state for name, state in states.items() if name not in registered}
