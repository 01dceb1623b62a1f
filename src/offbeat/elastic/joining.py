"""The admission of a rank that joins: members let it in, and a donor hands over what it needs."""

from collections.abc import Iterable
from dataclasses import replace

from offbeat.elastic import survivors
from offbeat.elastic.admission import Admission
from offbeat.elastic.agreement import Progress
from offbeat.elastic.generation import Generation
from offbeat.elastic.handover import give, take, tensors_of
from offbeat.elastic.join_barrier import donor_in, donor_of, let_in
from offbeat.exchange import Exchanged
from offbeat.liveness.failure import Phase
from offbeat.transport.links import Links


def admit(members: Generation, model: Exchanged, steps: int) -> list[str]:
    """Let a rank join if all have agreed on that for this step; return lines for the log.

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
    unit, rank, newcomer = members.unit, links.world.rank, request.rank
    with links.heartbeat.verb("step"):
        weight = members.parameters.drain()
    if members.has_reconnected:
        return []
    count = members.connection.unit_size
    # Each rank of a node that joins is served by the one that holds the same shards.
    place = links.world.local_rank if count > 1 else 0
    with members.meter.timing("admission"):
        between = let_in(links, request, count)
    if between is None:
        members.admission.refused = request
        return [f"{unit} {rank}: {unit} {newcomer} was lost while it joined"]
    donor = donor_of(links.world.ranks, newcomer) + place
    texts = _connect(members, between, (newcomer + place, donor), steps)
    if texts:
        return texts
    # Before it is given the model: it may be lost meanwhile.
    changes = [*members.lost], [*members.joined]
    _note(members, range(newcomer, newcomer + count), steps)
    weight /= 2 if rank == donor else 1
    members.parameters.restart(weight)
    if rank == donor:
        state = {
            "progress": members.progress._replace(steps=steps),
            "phase": members.control.detector.phase,
            "changes": changes,
            "weight": weight,
            "ahead_from": members.ahead_from,
            "slots": [slot.common() for slot in members.slots],
            "held": members.filler.common(),
        }
        with members.meter.timing("healing"):
            give(tensors_of(model), state, newcomer + place, members.control)
    ranks = list(members.connection.world.ranks)
    return [
        f"{unit} {rank}: {unit} {newcomer} has joined; {ranks} train on, with exchanges between "
        f"all from step {steps}"
    ]


def _connect(members: Generation, between: Links, pair: tuple[int, int], steps: int) -> list[str]:
    """Connect to all; return lines for the log if one was lost meanwhile: then none has joined."""
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
    state = take(tensors_of(model), donor_in(members.connection.world), members.control)
    members.filler.begin_with(state["held"])
    members.parameters.reset()
    members.parameters.restart(state["weight"])
    for slot, common in zip(slots, state["slots"], strict=True):
        slot.begin_with(common)
    members.progress = Progress(*state["progress"])
    members.steps = members.progress.steps
    members.ahead_from = state["ahead_from"]
    members.lost[:], members.joined[:] = state["changes"]
    if members.node is not None:
        members.node.go_on(members.connection.world.ranks, members.connection.world.rank)
    world = members.connection.world
    _note(members, world.nodes[world.node], members.steps)
    members.connection.resume(Phase(*state["phase"]))
    members.admission = Admission(members.connection.links)


def _note(members: Generation, numbers: Iterable[int], step: int) -> None:
    """Add the entries of what joins; "again": how many of its number were lost before."""
    for entry in (each for number in numbers for each in members.entries(number, step=step)):
        again = sum(loss["rank"] == entry["rank"] for loss in members.lost)
        members.joined.append(entry | ({"again": again} if again else {}))
