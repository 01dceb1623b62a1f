"""Ray Train: a lost worker is replaced, and the others train on."""

import os
from typing import Any, final

from offbeat.extras import extra
from offbeat.transport.rendezvous import VARIABLE

with extra("ray"):
    from ray.train.backend import Backend, BackendConfig
    from ray.train.torch import TorchConfig


@final
class ElasticConfig(TorchConfig):
    """Let Ray Train replace single workers: ``TorchTrainer(..., torch_config=ElasticConfig(...))``.

    Ray restarts all workers after a failure, unless each is a replica group of its own, as here. It
    makes no process group: workers meet in the store at ``address``, as ``host:port`` or
    ``host:port/name``, where ``offbeat store`` runs; by default the variable OFFBEAT_STORE of the
    process that calls ``fit``. They call ``replicate(elastic=True)``.

    Raises ``ValueError`` if there is no address.
    """

    def __init__(self, address: str | None = None) -> None:
        """Note the address of the store."""
        super().__init__(backend="gloo")  # which Ray asks for, and nobody starts
        self.address = address or os.environ.get(VARIABLE, "")
        if not self.address:
            raise ValueError(
                f"no address of a store; start `offbeat store` on a node that stays, and pass "
                f"ElasticConfig('host:port') or set {VARIABLE}"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray starts."""
        return _ElasticBackend


class _ElasticBackend(Backend):
    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Tell all workers of a start, or the one that replaces another, where the store is."""
        assert isinstance(backend_config, ElasticConfig), "Ray passes what names this class"
        worker_group.execute(_set_address, backend_config.address)


def _set_address(address: str) -> None:
    os.environ[VARIABLE] = address
