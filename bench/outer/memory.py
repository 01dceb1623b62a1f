"""Memory of a rank under each recipe, beside training alone: four ranks, a model of 50 million.

Unsharded every rank is a node. Sharded there are two nodes with two ranks each, among which FSDP2
divides the parameters. The unit is what a rank holds of the model, in float32.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from bench.harness import Bench, Claim, Result, command, console
from bench.harness.ranks import on_nodes
from bench.harness.resident import forget_peak, resident, return_large_tensors

WIDTH, DEPTH = 2048, 12  # of 12 linear layers, 50.4 million parameters
RANKS, SHARDS, STEPS = 4, 2, 4
ALONE = "alone"
_NARROW = "diloco(every=2,fragments=2,delay=1,wire='{}')".format
# What the docstrings say is held, in models, for n participants.
SAID: dict[str, tuple[str, Callable[[int], float]]] = {
    ALONE: ("0", lambda n: 0),
    "ddp": ("1", lambda n: 1),
    "local_sgd(every=2)": ("1", lambda n: 1),
    "diloco(every=2)": ("3", lambda n: 3),
    "diloco(every=2,fragments=2,delay=1)": ("3", lambda n: 3),
    _NARROW("bf16"): ("5 + 1/n", lambda n: 5 + 1 / n),
    _NARROW("int8"): ("4.5 + 1/n", lambda n: 4.5 + 1 / n),
    "sparse_loco(every=2)": ("3 + 1/16 + n/136", lambda n: 3 + 1 / 16 + n / 136),
    "sgp": ("2", lambda n: 2),
    "sgp(overlap=1)": ("5", lambda n: 5),
    "sgp(overlap=1,wire='bf16')": ("3", lambda n: 3),
    "daso(every=2)": ("2.5", lambda n: 2.5),
    "adasum": ("3", lambda n: 3),
    "ad_psgd": ("4", lambda n: 4),
    "lags(density=0.01)": ("3", lambda n: 3),
}
HEADINGS = ("recipe", "docstring", "held", "at most", "sharded: held", "at most")
BENCH = Bench(name="outer/memory", claim="Memory of a rank under each recipe", minutes=3)
Found = dict[str, "Memory | None"]  # by recipe; None where it is refused


@dataclass(frozen=True)
class Memory:
    """Models of memory: after a step, and at most from the attach to the last step."""

    held: float
    peak: float


def measure(question: tuple[list[str], int]) -> Found:
    """All recipes in turn, on every rank; the means of the ranks. Sharded if shards > 1."""
    recipes, shards = question
    return_large_tensors()
    found: Found = {}
    for text in [recipes[0], *recipes]:
        train(text, shards, WIDTH // 32)  # what is loaded or compiled at the first use
        own = train(text, shards, WIDTH)
        if own is not None:
            total = torch.tensor([own.held, own.peak], dtype=torch.float64)
            dist.all_reduce(total)
            own = Memory(*(total / dist.get_world_size()).tolist())
        found[text] = own
        if dist.get_rank() == 0:
            print(f"{text}: {own or 'refused'}", flush=True)
    return found


def train(text: str, shards: int, width: int) -> Memory | None:
    """Train under one recipe; None if it refuses sharded parameters."""
    dist.barrier()
    forget_peak()
    before = resident("VmRSS")
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(DEPTH)))
    size = sum(p.numel() * p.itemsize for p in model.parameters()) / shards
    mesh = None
    if shards > 1:
        shape = (dist.get_world_size() // shards, shards)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
        for layer in model:
            fully_shard(layer, mesh=mesh["local"])
        fully_shard(model, mesh=mesh["local"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    try:
        algorithm = offbeat.algorithm(text)
        replica = offbeat.replicate(model, algorithm, mesh=mesh, optimizer=optimizer)
    except ValueError:
        return None
    for _ in range(STEPS):
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    gc.collect()
    found = Memory((resident("VmRSS") - before) / size, (resident("VmHWM") - before) / size)
    replica.finish()
    replica.detach()
    return found


def beside(found: Found) -> Found:
    """What each recipe adds to training alone."""
    alone = found[ALONE]
    assert alone is not None, "training alone is never refused"
    return {
        name: own and Memory(own.held - alone.held, own.peak - alone.peak)
        for name, own in found.items()
        if name != ALONE
    }


def cells(own: Memory | None) -> tuple[str, str]:
    return (f"{own.held:.2f}", f"{own.peak:.2f}") if own else ("refused", "")


def claim(what: str, found: Found, n: int) -> Claim:
    """That nothing takes more than its docstring says."""
    over = {name: own.held - SAID[name][1](n) for name, own in found.items() if own}
    most = max(over, key=over.__getitem__)
    ours = f"{over[most]:+.2f} models at most ({most})"
    text = f"{what}: no recipe holds more than its docstring says"
    return Claim(text, "0.1 models more at most", ours, over[most] <= 0.1)


@command(BENCH)
def app() -> Result:
    """Train a model of 50 million parameters under each recipe, whole and sharded."""
    console.print("whole models, four nodes")
    whole: Found = on_nodes(measure, ([*SAID], 1), RANKS)
    console.print("shards, two nodes with two ranks each")
    sharded: Found = on_nodes(measure, ([*SAID], SHARDS), RANKS // SHARDS, SHARDS)
    extra = beside(whole), beside(sharded)
    rows = [
        (name, SAID[name][0], *cells(extra[0][name]), *cells(extra[1][name])) for name in extra[0]
    ]
    return Result(
        "Memory beside training alone, in models (sharded: in shards) of float32",
        HEADINGS,
        rows,
        [claim("whole models", extra[0], RANKS), claim("shards", extra[1], RANKS // SHARDS)],
        measured={"whole": whole, "sharded": sharded},
    )
