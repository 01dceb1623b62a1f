"""Whether a replica can be used at present."""

from typing import final

from offbeat.elastic.generation import Generation

SHOWN = "inside consensus(): leave the block first, or call show_own() after show_average()"
DETACHED = "after detach(): call replicate() again"
_INHERITED = "in a forked child of its process: its connections are the parent's"


@final
class Availability:
    """Refuses calls while the model shows the average, after a detach, and in a forked child."""

    def __init__(self, members: Generation) -> None:
        """Allow all calls."""
        self._members = members
        self.closed: str | None = None

    def require_open(self, also_shown: bool = False) -> None:
        """Raise ValueError where no call is allowed; ``also_shown``: but one on the average."""
        inherited = self._members.connection.is_inherited
        closed = self.closed or (_INHERITED if inherited else None)
        if closed is not None and not (also_shown and closed == SHOWN):
            raise ValueError(f"this replica cannot be used {closed}")
