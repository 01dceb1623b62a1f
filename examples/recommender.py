"""Train a recommender whose embeddings have sparse gradients, on generated clicks.

torchrun --nproc-per-node 2 examples/recommender.py --algorithm "ddp()"
"""

import argparse

import torch
import torch.distributed as dist
from journal import Journal
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import offbeat

TASTE, TAGS = 8, 4  # hidden numbers of a user and an item, tags of an item
Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # users, items, their tags (n, TAGS), clicks


class Clicks:
    """Users click on items of their taste; a few users and items make most of the events."""

    def __init__(self, users: int, items: int, tags: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.tags = torch.randint(tags, (items, TAGS), generator=random)
        tastes = torch.randn(tags, TASTE, generator=random)
        self.items = tastes[self.tags].mean(1) + 0.3 * torch.randn(items, TASTE, generator=random)
        self.users = torch.randn(users, TASTE, generator=random)

    def draw(self, size: int, random: torch.Generator) -> Batch:
        """Return a batch of events."""
        users, items = (
            (len(of) * torch.rand(size, generator=random) ** 3).long()
            for of in (self.users, self.items)
        )
        chance = (2 * (self.users[users] * self.items[items]).sum(1) - 1).sigmoid()
        clicked = torch.rand(size, generator=random) < chance
        return users, items, self.tags[items], clicked.float()


class Recommender(nn.Module):
    """Embeddings of users, items and tags, whose product and a small network score an event."""

    def __init__(self, users: int, items: int, tags: int, width: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        self.tags = nn.EmbeddingBag(tags, width, mode="mean", sparse=True)
        self.top = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))
        for table in (self.users, self.items, self.tags):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor, tags: Tensor) -> Tensor:
        """Return the logit of a click for each event."""
        user, item = self.users(users), self.items(items) + self.tags(tags)
        return (user * item).sum(1) + self.top(torch.cat([user, item], 1)).squeeze(1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean log-loss of a batch."""
    *event, clicked = batch
    return binary_cross_entropy_with_logits(model(*event), clicked)


def main(args: argparse.Namespace) -> None:
    """Train with SparseAdam for the embeddings and Adam for the network."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if dist.is_torchelastic_launched() else alone))
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    sizes = args.users, args.items, args.items // 20
    clicks, model = Clicks(*sizes), Recommender(*sizes, args.width)
    tables = [*model.users.parameters(), *model.items.parameters(), *model.tags.parameters()]
    optimizers = [
        torch.optim.SparseAdam(tables, args.lr),
        torch.optim.Adam(model.top.parameters(), args.lr),
    ]
    replica = offbeat.replicate(model, offbeat.algorithm(args.algorithm), optimizer=optimizers)
    random = torch.Generator().manual_seed(args.seed + rank)
    heldout = clicks.draw(args.heldout, torch.Generator().manual_seed(2**31 + rank))
    journal = Journal(args, replica, lambda: loss_of(model, heldout))
    for step in range(1, args.steps + 1):
        loss = loss_of(model, clicks.draw(args.batch_size, random))
        loss.backward()
        journal.take(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        replica.step()  # once, after the last optimizer
        journal.after(step)
    replica.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("algorithm", "ddp()", "recipe, as listed by `offbeat recipes`"),
        ("steps", 300, "optimizer steps"),
        ("batch-size", 1024, "events per rank and step"),
        ("users", 50_000, "number of users"),
        ("items", 10_000, "number of items"),
        ("width", 32, "embedding dimension"),
        ("lr", 1e-2, "learning rate of both optimizers"),
        ("seed", 0, "random seed; the rank is added to it for batches"),
        ("report-every", 50, "steps between evaluations"),
        ("heldout", 20_000, "held-out events per rank and evaluation"),
        ("out", "", "file for the evaluations as JSON lines"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    main(parser.parse_args())
