"""The token of a run: who may take part is checked before anything that a peer has written is read.

A TCPStore authenticates nobody. So all keys of a run begin with a name that only its token gives,
and one key outside of them tells by a challenge whose store it is. The token is never sent. Whoever
can reach the store may list its keys and write to them, and Gloo has no authentication at all:
this keeps strangers and workers of other runs out by mistake, an encrypted network those by force.
"""

import hmac
import os
import secrets

from offbeat.liveness.store.client import TimedStore

VARIABLE = "OFFBEAT_TOKEN"
KEY = "token"  # of the challenge, outside of the keys of a run
OPEN = "open"  # the answer of a run without a token
SHORTEST = 16  # characters: the answer to a challenge can be guessed without asking anybody
REMEDY = f"start the store and all workers of one run with the same {VARIABLE}"


def keys_of_run() -> str:
    """Return the beginning of all keys of a run with the token of this process.

    Raises ``ValueError`` for a token that is too short.
    """
    token = _token()
    return f"{_answer(token, 'keys')[:32]}/" if token else ""


def challenge() -> str:
    """Return a new question together with the answer, which only the token of this process gives.

    One line of ASCII: 32 hexadecimal digits, and HMAC-SHA256 of these under the token.
    """
    if not (token := _token()):
        return OPEN
    nonce = secrets.token_hex(16)
    return f"{nonce} {_answer(token, nonce)}"


def require_same_token(said: str, where: str) -> None:
    """Raise ``ValueError`` unless ``said`` is the challenge of a store of this process's run."""
    token, (nonce, _, answer) = _token(), said.partition(" ")
    if said == OPEN and not token:
        return
    if said == OPEN:
        raise ValueError(f"{VARIABLE} is set, but the run at {where} has no token; {REMEDY}")
    if not token:
        raise ValueError(f"the run at {where} has a token, and {VARIABLE} is not set; {REMEDY}")
    if not hmac.compare_digest(answer.encode(), _answer(token, nonce).encode()):
        raise ValueError(f"{VARIABLE}: the run at {where} has another token; {REMEDY}")


def claim(store: TimedStore, where: str) -> None:
    """Make ``store`` that of this process's run if it is nobody's; ``ValueError`` if another's."""
    require_same_token(store.compare_set(KEY, "", challenge()).decode(), where)


def fault_of_process_group() -> str | None:
    """Return why the token cannot be checked in a process group of torch, None without a token."""
    if VARIABLE not in os.environ:
        return None
    return (
        f"{VARIABLE} is set, but init_process_group() connects ranks without asking for it; let "
        "them meet in `offbeat store` by OFFBEAT_STORE, or by World.at(...), or unset it"
    )


def _token() -> str:
    token = os.environ.get(VARIABLE, "")
    if VARIABLE in os.environ and len(token) < SHORTEST:
        raise ValueError(
            f"{VARIABLE} has {len(token)} characters, expected at least {SHORTEST} that nobody "
            "guesses; make one with: openssl rand -hex 32"
        )
    return token


def _answer(token: str, question: str) -> str:
    return hmac.new(token.encode(), f"offbeat {question}".encode(), "sha256").hexdigest()
