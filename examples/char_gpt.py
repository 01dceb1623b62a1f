"""Train a character-level GPT on the source code of Python's standard library.

torchrun --nproc-per-node 4 examples/char_gpt.py --algorithm "sgp()" --sample 300
"""

import argparse
import json
import string
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from journal import Journal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat

CHARACTERS = string.printable + "\N{REPLACEMENT CHARACTER}"  # the last one replaces all others


class GPT(nn.Module):
    """A causal transformer: tokens (n, length) to logits of the next token (n, length, tokens)."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Embedding(context, width)
        kind = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
        layers = (nn.TransformerEncoderLayer(width, heads, 4 * width, **kind) for _ in range(depth))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x)


def read_corpus() -> list[Tensor]:
    """Return the training and the held-out text: every tenth top-level module is held out."""
    index, parts = {c: i for i, c in enumerate(CHARACTERS)}, (bytearray(), bytearray())
    for i, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts[i % 10 == 9].extend(index.get(c, len(index) - 1) for c in text)
    return [torch.frombuffer(part, dtype=torch.uint8).long() for part in parts]


def loss_of(model: nn.Module, text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return the mean loss over the windows of `text` at `starts`, in nats per character."""
    window = text[starts[:, None] + torch.arange(context + 1)].to(next(model.parameters()).device)
    return cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def write_text(model: nn.Module, length: int, context: int, device: torch.device) -> str:
    """Sample `length` characters from the model after the prompt `def`."""
    tokens = torch.tensor([[CHARACTERS.index(c) for c in "def "]], device=device)
    for _ in range(length):
        chances = (model(tokens[:, -context:])[:, -1] / 0.7).softmax(-1)
        tokens = torch.cat([tokens, chances.multinomial(1)], dim=1)
    return "".join(CHARACTERS[i] for i in tokens[0])


def main(args: argparse.Namespace) -> None:
    """Train, evaluate at regular intervals, and synchronize the replicas at the end."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if dist.is_torchelastic_launched() else alone))
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(0))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed + rank)  # own data on each rank; the model will be rank 0's
    model = GPT(args.width, args.depth, args.heads, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    replica = offbeat.replicate(model, offbeat.algorithm(args.algorithm), optimizer=optimizer)
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
    if args.sample and rank == 0:
        journal.write({"sample": write_text(model, args.sample, args.context, device)})
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("algorithm", "ddp()", "recipe, as listed by `offbeat recipes`"),
        ("steps", 1000, "optimizer steps"),
        ("batch-size", 8, "windows of text per rank and step"),
        ("context", 64, "characters per window"),
        ("width", 128, "embedding dimension"),
        ("depth", 2, "transformer layers"),
        ("heads", 4, "attention heads per layer"),
        ("lr", 1e-2, "peak learning rate"),
        ("options-for", "{}", 'options of single algorithms, as in {"adasum()": {"lr": 5e-3}}'),
        ("seed", 0, "random seed; the rank is added to it"),
        ("report-every", 50, "steps between evaluations"),
        ("out", "", "file for the evaluations as JSON lines"),
        ("windows", 128, "held-out windows per evaluation, one or more for each rank"),
        ("sample", 0, "characters of text to sample at the end"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    given = vars(parser.parse_args())
    main(argparse.Namespace(**given | json.loads(given["options_for"]).get(given["algorithm"], {})))
