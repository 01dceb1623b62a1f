"""No recipe holds more memory than its docstring says, beside training alone, whole or sharded."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from bench.harness import Bench, Claim, Result, command
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
BENCH = Bench(name="outer/memory", minutes=3)


@dataclass(frozen=True)
class Memory:
    """Models of memory: after a step, and at most from the attach to the last step."""

    held: float
    peak: float


def measure(question: tuple[list[str], int]) -> dict[str, Memory | None]:
    """All recipes in turn, on every rank; the means of the ranks. Sharded if shards > 1."""
    recipes, shards = question
    return_large_tensors()
    found: dict[str, Memory | None] = {}
    for text in [recipes[0], *recipes]:
        train(text, shards, WIDTH // 32)  # what is loaded or compiled at the first use
        own = train(text, shards, WIDTH)
        if own is not None:
            total = torch.tensor([own.held, own.peak], dtype=torch.float64)
            dist.all_reduce(total)
            own = Memory(*(total / dist.get_world_size()).tolist())
        found[text] = own
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
        for part in (*model, model):
            fully_shard(part, mesh=mesh["local"])
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


@command(BENCH)
def app() -> Result:
    """Train a model of 50 million parameters on four nodes; in shards on two, with two ranks."""
    cells, claims, measured = {name: [SAID[name][0]] for name in SAID if name != ALONE}, [], {}
    for key, what, shards in (("whole", "whole models", 1), ("sharded", "shards", SHARDS)):
        n = RANKS // shards
        found = measured[key] = on_nodes(measure, ([*SAID], shards), n, shards)
        over = {}
        for name, line in cells.items():
            line += ["refused", ""]
            if own := found[name]:
                held, peak = own.held - found[ALONE].held, own.peak - found[ALONE].peak
                line[-2:] = f"{held:.2f}", f"{peak:.2f}"
                over[name] = held - SAID[name][1](n)
        most = max(over, key=over.__getitem__)
        ours = f"{over[most]:+.2f} models at most ({most})"
        text = f"{what}: no recipe holds more than its docstring says"
        claims.append(Claim(text, "0.1 models more at most", ours, over[most] <= 0.1))
    rows = [(name, *line) for name, line in cells.items()]
    title = "Memory beside training alone, in models (sharded: in shards) of float32"
    return Result(title, HEADINGS, rows, claims, measured)
