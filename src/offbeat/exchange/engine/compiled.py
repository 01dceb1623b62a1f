"""The graph of a compiled model, divided so that gradients are exchanged during backward."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from offbeat.exchange.engine.bucket import BUCKET, FIRST_BUCKET, capacity


def compile_in_buckets(
    graph: GraphModule,
    inputs: list[Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph by inductor in parts, each with the parameters of about one bucket.

    The backend ``"offbeat"`` of ``torch.compile``. The backward of a graph hands out all its
    gradients at its end; that of a part does so before those of the parts in front of it run.
    The graph is divided as for ``DistributedDataParallel``, but in at least eight parts if they
    hold 1 MiB. ``mode`` and ``options`` are inductor's. Results are those of
    ``backend="inductor"`` up to the order of sums.
    """
    # Importing them takes seconds, and has happened where a model is compiled.
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._inductor import list_mode_options

    # Graphs take parameters as inputs, with what they are known by.
    held = [
        node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"
    ]
    total = sum(p.nbytes for p in held if isinstance(p, Parameter) and p.requires_grad)
    most = capacity(total, BUCKET)
    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    inductor: Any = lookup_backend("inductor")
    backend = partial(inductor, config_patches=patches) if patches else inductor
    parts = DDPOptimizer(most, backend, min(FIRST_BUCKET, most))
    compiled: Callable[..., Any] = parts.compile_fn(graph, inputs)
    return compiled
