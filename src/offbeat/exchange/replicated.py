"""Parts of parameters that several ranks of a node hold, as norms under tensor parallelism."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from offbeat.exchange.exchanged import Exchanged
from offbeat.exchange.sharding import holders, local
from offbeat.functional import Layout, pack
from offbeat.transport.group import Group, message_device
from offbeat.transport.messages import exchange
from offbeat.transport.world import World


@final
class Replicated:
    """Copies such parts from the first rank that holds them to the others.

    Only the first exchanges them as parameters. ``theirs`` names those that another exchanges.
    """

    def __init__(self, model: Exchanged, world: World, group: Group) -> None:
        everyone, trained = holders(model.parameters, world), model.trained
        held = {name: local(p) for name, p in trained.items() if len(everyone[name]) > 1}
        self._is_empty = all(len(everyone[name]) == 1 for name in trained)  # on all ranks alike
        self.theirs = {name for name in held if everyone[name][0] != group.rank}
        self._group, self._layouts = group, dict[tuple[int, ...], Layout]()
        for ranks in dict.fromkeys(everyone[name] for name in held):
            same = {name: part for name, part in held.items() if everyone[name] == ranks}
            self._layouts[ranks] = Layout.of(same)

    def counted(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what this rank holds, with nothing of what another one exchanges."""
        return {n: part.new_empty(0) if n in self.theirs else part for n, part in parts.items()}

    def copy(self, parts: Mapping[str, Tensor]) -> None:
        """Copy in place; all ranks of the node call. Names may be missing, on all of them alike."""
        if self._is_empty:  # as of most models: also after a loss, which has closed the group
            return
        # Of gradients each rank exchanges all that it holds, and what a method selects or rounds
        # may depend on what else that is: by the copy they stay equal, bit for bit.
        sends, receives, copies = [], [], []
        for ranks, layout in self._layouts.items():
            held = {name: parts[name] for name in layout.places if name in parts}
            if not held:
                continue
            flat = layout.empty(message_device(self._group, next(iter(held.values())).device))
            views = [layout.views(flat)[name] for name in held]
            if ranks[0] == self._group.rank:
                pack(views, held.values())
                sends += [(rank, part) for rank in ranks[1:] for part in flat]
            else:
                receives += [(ranks[0], part) for part in flat]
                copies.append((held, views))
        exchange(sends, receives, self._group).wait()
        for held, views in copies:
            pack(held.values(), views)
