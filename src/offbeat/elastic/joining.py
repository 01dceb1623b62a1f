"""The admission of ranks that join: members let them in, a donor hands over what they need."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from offbeat.elastic import survivors
from offbeat.elastic.admission import Admission
from offbeat.elastic.agreement import Progress
from offbeat.elastic.generation import Generation
from offbeat.elastic.handover import give, take, tensors_of
from offbeat.elastic.join_barrier import donor_in, donor_of, let_in
from offbeat.exchange import Exchanged
from offbeat.liveness.failure import Phase
from offbeat.transport.links import Links

Entries = list[dict[str, int]]


def admit(members: Generation, model: Exchanged, steps: int) -> list[str]:
    """Let ranks join if all have agreed on that for this step; return lines for the log.

    Raises :class:`PeerLost` if one was lost since the last step: a rank that comes back waits.

    What is in flight is merged. Only the donor is late for the exchange that follows, by what it
    hands over.
    """
    links = members.connection.links
    if links is None:
        return []
    links.heartbeat.raise_agreed_error()  # of a loss since the last step
    if (request := members.admission.due(joins=True)) is None:
        return []
    unit, rank = members.unit, links.world.rank
    coming = f"{unit}s {[*request.ranks]} have" if request.others else f"{unit} {request.rank} has"
    with links.heartbeat.verb("step"):
        weight = members.parameters.drain()
    if members.has_reconnected:
        return []
    count = members.connection.unit_size
    # Each rank of a node that joins is served by the one that holds the same shards.
    place = links.world.local_rank if count > 1 else 0
    with members.meter.timing("admission"):
        between = let_in(links, request, count, lambda: members.admission.has_met)
    if between is None:
        members.admission.refused = request
        return [f"{unit} {rank}: {coming} not joined: one was lost meanwhile"]
    if members.node is not None:
        members.node.know(request.ranks)
    donor = donor_of(links.world.ranks, request.rank) + place
    served = [newcomer + place for newcomer in request.ranks]
    # Before all connect, when one may be lost: some notice that then, and others in what follows.
    changes = [*members.lost], [*members.joined]
    _note(members, between.newcomers, steps)
    if texts := _connect(members, between, (donor, *served), steps):
        return texts
    weight /= 1 + len(served) if rank == donor else 1
    members.parameters.restart(weight)
    if rank == donor:
        with members.meter.timing("healing"):
            for newcomer in served:
                give(
                    tensors_of(model),
                    lambda: _state(members, changes, weight, steps),
                    newcomer,
                    members.control,
                )
    ranks = list(members.connection.world.ranks)
    return [
        f"{unit} {rank}: {coming} joined; {ranks} train on, with exchanges between all from step "
        f"{steps}"
    ]


def _state(
    members: Generation, changes: tuple[Entries, Entries], weight: float, steps: int
) -> dict[str, Any]:
    """Return what a donor hands over beside the model."""
    return {
        "progress": members.progress._replace(steps=steps),
        "phase": members.control.detector.phase,
        "changes": changes,
        "planned": members.planned,
        "switches": members.switches,
        "weight": weight,
        "committed_in": members.committed_in,
        "ahead_from": members.ahead_from,
        "slots": [slot.common() for slot in members.slots],
        "held": members.filler.common(),
    }


def _connect(members: Generation, between: Links, pair: tuple[int, ...], steps: int) -> list[str]:
    """Connect to all; return lines for the log if one was lost meanwhile."""
    links, place = members.connection.links, members.progress._replace(steps=steps)
    earlier = members.connection
    current = replace(earlier, world=between.world, links=between, control=None)
    try:
        found = survivors.connect_over(
            current, earlier, members.filler, place, [], members.made, pair
        )
    finally:
        if links is not None:
            links.close(at_once=True)  # all have come to the barrier; one may be lost since
    return members.adopt(found)


def join(members: Generation, model: Exchanged) -> None:
    """Take the place, the model and the state of the donor."""
    slots = members.slots
    links = members.connection.links
    assert links is not None, "a rank joins others"
    state = take(tensors_of(model), donor_in(links), members.control)
    members.filler.begin_with(state["held"])
    members.parameters.reset()
    members.parameters.restart(state["weight"])
    for slot, common in zip(slots, state["slots"], strict=True):
        slot.begin_with(common)
    members.progress = Progress(*state["progress"])
    members.steps = members.progress.steps
    members.committed_in, members.ahead_from = state["committed_in"], state["ahead_from"]
    members.lost[:], members.joined[:] = state["changes"]
    members.planned, members.switches[:] = state["planned"], state["switches"]
    if members.node is not None:
        members.node.go_on(members.connection.world.ranks, members.connection.world.rank)
    _note(members, links.newcomers, members.steps)
    members.connection.resume(Phase(*state["phase"]))
    members.admission = Admission(links)


def _note(members: Generation, numbers: Iterable[int], step: int) -> None:
    """Add the entries of what joins; "again": how many of its number were lost before."""
    for entry in (each for number in numbers for each in members.entries(number, step=step)):
        again = sum(loss["rank"] == entry["rank"] for loss in members.lost)
        members.joined.append(entry | ({"again": again} if again else {}))
