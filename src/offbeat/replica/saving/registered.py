"""What the objects that a run has registered save with a replica, as text."""

import json
from collections.abc import Mapping
from typing import Any

from offbeat.elastic.generation import Generation
from offbeat.elastic.portable import put_together, taken_apart
from offbeat.kit.warning import warn
from offbeat.transport.small_gathers import raise_alike


def texts_of(members: Generation) -> dict[str, str]:
    """Return the states by name. Raises ``ValueError`` for what is no number or text."""
    return {name: _text_of(name, each) for name, each in members.filler.saved.items()}


def load(members: Generation, texts: Mapping[str, str], stays: bool) -> None:
    """Load states on all ranks or on none; without ``stays`` only try. All ranks call.

    States of no object here are kept for one that is registered later.
    """
    registered, fault = members.filler.saved, None
    states, before = dict[str, Any](), dict[str, str]()
    try:
        states |= {name: _value_of(text) for name, text in texts.items()}
        for name in filter(registered.__contains__, states):
            before[name] = _text_of(name, registered[name])
            registered[name].load_state_dict(states[name])
    except Exception as error:  # the caller's code may raise anything, and the others wait
        fault = f"cannot load a registered state: {error!r}"
    try:
        raise_alike(fault, members.connection.control)
    except Exception:
        stays = False
        raise
    finally:
        if not stays:
            for name, text in before.items():
                registered[name].load_state_dict(_value_of(text))
    if stays:
        members.filler.received.update({k: v for k, v in states.items() if k not in registered})
        _warn_of_missing(members, texts)


def _text_of(name: str, stateful: Any) -> str:
    try:
        text, tensors = taken_apart(stateful.state_dict())
        if tensors:
            raise ValueError("it holds tensors, expected numbers and text")
    except ValueError as error:
        raise ValueError(
            f"cannot save the state of the registered {name!r}: {error}; register it without "
            "is_saved and save its state beside the replica's"
        ) from None
    return text


def _value_of(text: str) -> Any:
    """Return a state; an older text is plain JSON."""
    is_plain = not text.startswith(('{"dict": [', '{"list": [', '{"tuple": ['))
    return json.loads(text) if is_plain else put_together(text, [])


def _warn_of_missing(members: Generation, texts: Mapping[str, str]) -> None:
    missing = sorted(members.filler.saved.keys() - texts.keys())
    if missing and members.world.rank == members.world.ranks[0]:
        warn(
            f"the loaded state holds nothing of {', '.join(map(repr, missing))}, only of "
            f"{', '.join(map(repr, texts)) or 'the replica'}: what is registered here begins anew"
        )
