"""Train a two-layer LSTM on the source code of Python's standard library.

torchrun --nproc-per-node 4 examples/lstm_text.py --algorithm sgp
"""

import argparse

import torch
import torch.distributed as dist
from char_gpt import CHARACTERS, loss_of, read_corpus
from torch import Tensor, nn

import offbeat


class LSTM(nn.Module):
    """Embedding, two LSTM layers and a linear output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(len(CHARACTERS), width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.layers(self.token(tokens))
        logits: Tensor = self.head(hidden)
        return logits


def main(args: argparse.Namespace) -> None:
    """Train with clipping and gradient accumulation, then evaluate the averaged model."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if dist.is_torchelastic_launched() else alone))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    train, heldout = read_corpus()
    model = LSTM(args.width)
    replica = offbeat.replicate(model, offbeat.algorithm(args.algorithm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(1, args.steps + 1):
        for part in range(args.accumulate):
            replica.set_requires_sync(part == args.accumulate - 1)
            starts = torch.randint(len(train) - args.context, (args.batch_size,))
            loss = loss_of(model, train, starts, args.context)
            (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        replica.report_loss(loss)
        replica.step()
        if rank == 0 and step % args.report_every == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    replica.finish()
    fixed = torch.linspace(0, len(heldout) - args.context - 1, 256).long()[rank::world]
    with torch.no_grad():
        heldout_loss = loss_of(model, heldout, fixed, args.context).item()
    replica.report_loss(heldout_loss, "heldout")
    if rank == 0:
        print(f"held-out loss {heldout_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("algorithm", "ddp()", "recipe, as listed by `offbeat recipes`"),
        ("steps", 300, "optimizer steps"),
        ("batch-size", 8, "windows of text per rank and micro-batch"),
        ("accumulate", 1, "micro-batches per step"),
        ("context", 64, "characters per window"),
        ("width", 256, "embedding and hidden dimension"),
        ("lr", 3e-3, "learning rate"),
        ("seed", 0, "random seed; the rank is added to it"),
        ("report-every", 50, "steps between reports"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    main(parser.parse_args())
