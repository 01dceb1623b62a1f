"""Batch normalization over the ranks of a node."""

from torch import nn
from torch.distributed import DeviceMesh

from offbeat.attach.start import given_world
from offbeat.platform.privates import BatchNorm
from offbeat.platform.process_group import open_subgroup
from offbeat.transport.world import World


def sync_batch_norm(model: nn.Module, mesh: DeviceMesh | World | None = None) -> nn.Module:
    r"""Replace BatchNorm layers by ones that normalize over the batches of the whole node.

    .. math:: \mu = \frac{1}{|B|} \sum_{i \in B} x_i, \quad B = \bigcup_{p \text{ in the node}} B_p

    They become :class:`torch.nn.SyncBatchNorm` over the node's ranks. Call on all ranks, before
    :func:`replicate`, and use the returned model. Running statistics then agree inside a node;
    ``finish()`` averages them between nodes. Bytes sent per layer and forward: 2 C + 1 numbers to
    each other rank of the node, for C channels, and 2 C in backward.

    Args:
        model: on its device already.
        mesh: as in :func:`replicate`.

    Raises:
        ValueError: if such a layer lies on a CPU, where torch has no synchronized one.

    Source: Coquelin et al. 2021, section 4.2: "conducted within the node-local process group".
    """
    nodes = (given_world(mesh) or World.discover()).nodes
    layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
    if not layers or max(map(len, nodes)) == 1:
        return model
    tensors = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    if any(tensor.device.type == "cpu" for tensor in tensors):
        raise ValueError(
            "the model has BatchNorm layers on the CPU, and torch.nn.SyncBatchNorm works on GPUs "
            "only; move the model to its GPU first, or leave the layers as they are: each rank "
            "then normalizes its own batch, and finish() averages the running statistics"
        )
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, open_subgroup(nodes))
    return synced
