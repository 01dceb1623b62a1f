"""Another method from the next step on: the same ranks, over the same links, with other slots."""

from collections.abc import Callable
from dataclasses import replace

from offbeat.elastic.generation import Generation
from offbeat.elastic.join import PRESENT
from offbeat.exchange import Algorithm, BoundGradients, BoundParameters


def switch(members: Generation, algorithm: Algorithm, leave: Callable[[], None]) -> None:
    """Fill the slots by ``algorithm``; all ranks call, between two steps.

    An exchange that both algorithms have goes on undisturbed. Before another one comes, ``leave``
    merges what is in flight and makes models equal, where that is necessary. If a rank is lost
    meanwhile, all others have switched, or none has.
    """
    before, filler = members.algorithm, replace(members.filler, algorithm=algorithm)
    parameters, gradients = members.parameters, members.gradients
    replaced: list[BoundParameters | BoundGradients] = []
    leave()
    if algorithm.parameters != before.parameters:
        replaced.append(parameters)
        parameters = members.filled_parameters(filler)
        parameters.reset()  # in a run with weights, samples count from here
    if algorithm.gradients != before.gradients:
        replaced.append(gradients)
        gradients = members.filled_gradients(filler)
        gradients.carry(members.gradients)
    links = members.connection.links
    if links is not None and links.run and members.world.rank == members.world.ranks[0]:
        links.store.set(PRESENT, repr(algorithm))  # a rank that joins reads it once it is let in
    members.take_over(filler, parameters, gradients)
    members.notes[:] = dict.fromkeys(members.notes)
    members.switches.append({"step": members.progress.steps, "algorithm": str(algorithm)})
    # Not before take_over(), where all ranks are: a socket that closes discards what is not read.
    for slot in replaced:
        slot.detach()
        for near in (links, members.node.links if members.node else None):
            if near is not None and slot.site is not None:
                near.drop([group for group in slot.site.groups if group in near.opened])
