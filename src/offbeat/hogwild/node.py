"""Lock-free updates inside a node, and an exchange between nodes."""

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from offbeat.exchange import Algorithm
from offbeat.replica.replicate import replicate
from offbeat.transport.world import World


class NodeReplica:
    r"""Exchanges the shared model between nodes while the workers of each node update it.

    .. math::
        s \leftarrow \theta, \quad s' = \mathrm{exchange}(s), \quad
        \theta \leftarrow \theta + (s' - s)

    theta is the model in shared memory and s a copy of it, on which an ordinary
    :class:`offbeat.Replica` carries out the algorithm's exchange. The change by the exchange is
    added to theta in place, so that updates made by workers meanwhile are kept. The numerator of
    push-sum is :math:`w\,a + (s - a)` with the anchor a, which is s' of the last exchange.

    All nodes call :meth:`step` equally often, for example every 100 steps of the shared
    optimizer. Moments and buffers are not exchanged. Only algorithms with an empty gradients
    slot; nodes are the ranks of the process group. Bytes: the algorithm's, per call. Extra
    memory: two models, and the algorithm's. Passes over memory: four, and the algorithm's.

    Data races are accepted: workers write while the copy is made, so it is no atomic snapshot; and
    an addition may overwrite a worker's update of the same coordinate or be overwritten by it, as
    with the updates of two workers. The next exchange starts from the contents of the memory, so
    that a lost change does not accumulate.

    Args:
        model: the module that the workers update, in shared memory.
        algorithm: what :func:`offbeat.sgp`, :func:`offbeat.local_sgd` or another recipe returns.
        mesh: as in :func:`offbeat.replicate`.

    Raises:
        ValueError: if the model is not shared, or the algorithm exchanges gradients.

    >>> import offbeat
    >>> from offbeat.testing import ThreadWorld
    >>> def train(world):
    ...     model = nn.Linear(1, 1, bias=False).share_memory()
    ...     node = NodeReplica(model, offbeat.local_sgd(every=1), mesh=world)
    ...     with torch.no_grad():
    ...         model.weight.fill_(float(world.rank))  # what the workers of the node found
    ...     node.step()
    ...     return model.weight.item()
    >>> ThreadWorld(2).run(train)
    [0.5, 0.5]
    """

    def __init__(
        self, model: nn.Module, algorithm: Algorithm, *, mesh: DeviceMesh | World | None = None
    ) -> None:
        unshared = [name for name, p in model.named_parameters() if not p.is_shared()]
        if unshared:
            raise ValueError(
                f"parameters {unshared[:3]} are not in shared memory, where workers would update "
                "them; build AsyncAdam first, or call model.share_memory()"
            )
        if algorithm.auto is not None or any(each.gradients for each in algorithm.phases):
            raise ValueError(
                f"{algorithm} exchanges gradients, which stay with the workers; use one that "
                "exchanges parameters only, such as offbeat.sgp() or offbeat.local_sgd()"
            )
        # The parameters alone: a module with a sparse embedding could not be replicated, although
        # no gradient ever reaches this copy. Names of a ParameterDict may not hold dots.
        trained = {
            name.replace(".", "/"): shared.detach()
            for name, shared in model.named_parameters()
            if shared.requires_grad
        }
        snapshot = nn.ParameterDict({n: nn.Parameter(p.clone()) for n, p in trained.items()})
        self.replica = replicate(snapshot, algorithm, mesh=mesh)
        self._pairs: list[tuple[Tensor, Tensor]] = [
            (shared, snapshot[name].detach()) for name, shared in trained.items()
        ]
        self._before = [torch.empty_like(own) for _, own in self._pairs]
        for shared, own in self._pairs:  # rank 0's start; no worker runs yet
            shared.copy_(own)

    def step(self) -> None:
        """Exchange if it is due; all nodes call, while workers may run."""
        self._read()
        self.replica.step()
        for before, (shared, own) in zip(self._before, self._pairs, strict=True):
            if not own.equal(before):  # writing back unchanged values would race for nothing
                shared.add_(torch.sub(own, before, out=before))

    def finish(self) -> None:
        """Set all nodes to their average; call it on all nodes while no worker runs."""
        self._read()
        self.replica.finish()
        for shared, own in self._pairs:
            shared.copy_(own)

    def detach(self) -> None:
        """Remove every thread and group."""
        self.replica.detach()

    def _read(self) -> None:
        for before, (shared, own) in zip(self._before, self._pairs, strict=True):
            before.copy_(shared)
            own.copy_(before)
