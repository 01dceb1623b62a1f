"""What the steps of a rank stand for, and the weights of all ranks in the means that follow."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from offbeat.exchange.site import Site
from offbeat.exchange.state import State, Variable, plain
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device
from offbeat.transport.small_gathers import gather_numbers


@final
@dataclass(eq=False)
class Window(State):
    """The samples for which the steps of this rank since its last exchange stand."""

    site: Site
    covered: float = 0.0  # by earlier exchanges
    sent: float = 0.0  # the part of these that has not arrived

    @property
    def samples(self) -> float:
        """How many they are; 0 in a run without weights."""
        weights = self.site.weights
        return 0.0 if weights is None else max(0.0, weights.samples.total - self.covered)

    def weigh(self, *, is_average: bool = False) -> None:
        """Agree on the shares of this exchange; one small gather of all ranks.

        ``is_average``: of models that may have made no step since.
        """
        site = self.site
        if site.weights is None or site.control is None:
            return
        mine = [self.samples, site.weights.samples.is_out]
        rows = dict(zip(site.control.ranks, gather_numbers(mine, site.control), strict=True))
        members = site.world.nodes if site.axis == "node" else [[rank] for rank in rows]
        amounts = [sum(rows[rank][0] for rank in ranks) for ranks in members]
        may_rest = is_average or any(is_out for _, is_out in rows.values())
        site.weights.divide(amounts, 1.0 if may_rest else None)

    def send(self) -> None:
        """Begin the next window, while the exchange of this one is in flight."""
        self.sent = self.samples
        if self.site.weights is not None:
            # Not a sum: what rounding leaves of fractions would be all the samples of a window.
            self.covered = self.site.weights.samples.total

    def arrive(self) -> None:
        """Note that the exchange in flight has been committed."""
        self.sent = 0.0

    def close(self) -> None:
        """Begin the next window, once the exchange has been committed; none is in flight."""
        self.send()
        self.arrive()

    def undo(self) -> None:
        """Count samples again whose exchange was lost."""
        self.covered -= self.sent
        self.sent = 0.0

    def state(self) -> Iterator[Variable]:
        """Yield the numbers of samples, in a run with weights."""
        if self.site.weights is not None:
            yield Variable("window", "own", lambda: self.samples, self._restore, _fault)
            yield plain("in_flight", self, "sent", _fault, "window_sent")

    def _restore(self, samples: float) -> None:
        self.close()
        self.covered -= samples


def _fault(samples: float) -> str | None:
    return None if 0 <= samples < torch.inf else f"{samples} samples, expected 0 or more"


def weigh_gradients(site: Site, group: Group) -> None:
    """Agree on the shares of a backward, by what the step of each member stands for."""
    if site.weights is None:
        return
    # It compares no calls: a rank that runs no backward comes here in another call than the others,
    # and the messages that follow are compared.
    samples = site.weights.samples
    device = message_device(group)
    mine = torch.tensor([samples.now, samples.is_out], dtype=torch.float64, device=device)
    arrived = mine.new_empty(group.size * 2)
    all_gather(arrived, mine, group).wait()
    rows = arrived.view(-1, 2).tolist()
    may_rest = site.axis == "local" or any(is_out for _, is_out in rows)
    site.weights.divide([amount for amount, _ in rows], 0.0 if may_rest else None)
