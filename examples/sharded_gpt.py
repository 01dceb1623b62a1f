"""Train a character-level GPT whose parameters FSDP2 shards inside each node.

torchrun --nproc-per-node 4 examples/sharded_gpt.py --shards 2
"""

import argparse

import torch
import torch.distributed as dist
from char_gpt import GPT, loss_of, read_corpus
from journal import Journal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat


def shard(model: GPT, mesh: DeviceMesh) -> nn.Module:
    """Divide each layer, and then the rest of the model, among the ranks of a node."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(args: argparse.Namespace) -> None:
    """Train, evaluate at regular intervals, and synchronize the replicas at the end."""
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(0))
        torch.cuda.set_device(device)
    # Each row of the mesh is a node. With one torchrun per node these are the machines.
    shape = (world // args.shards, args.shards)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "local"))
    torch.manual_seed(args.seed)
    model = shard(GPT(args.width, args.depth, args.heads, args.context).to(device), mesh["local"])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    algorithm = offbeat.algorithm(args.algorithm)
    replica = offbeat.replicate(model, algorithm, mesh=mesh, optimizer=optimizer)
    torch.manual_seed(args.seed + rank)  # own data on each rank
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
    train, heldout = read_corpus()
    fixed = torch.linspace(0, len(heldout) - args.context - 1, args.windows).long()[rank::world]
    journal = Journal(args, replica, lambda: loss_of(model, heldout, fixed, args.context))
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(train) - args.context, (args.batch_size,))
        loss = loss_of(model, train, starts, args.context)
        loss.backward()
        journal.take(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        replica.step()
        journal.after(step)
    replica.finish()
    replica.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("algorithm", "sgp(overlap=1, within='local')", "recipe between nodes"),
        ("shards", 2, "ranks of a node, among which each parameter is divided"),
        ("steps", 1000, "optimizer steps"),
        ("batch-size", 8, "windows of text per rank and step"),
        ("context", 64, "characters per window"),
        ("width", 128, "embedding dimension"),
        ("depth", 2, "transformer layers"),
        ("heads", 4, "attention heads per layer"),
        ("lr", 1e-2, "peak learning rate"),
        ("seed", 0, "random seed; the rank is added to it for the data"),
        ("report-every", 50, "steps between evaluations"),
        ("out", "", "file for the evaluations as JSON lines"),
        ("windows", 128, "held-out windows per evaluation, over all ranks"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    main(parser.parse_args())
