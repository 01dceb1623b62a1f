"""Train skip-gram word vectors with asynchronous Adam in shared memory.

python examples/skipgram.py --workers 2

With several nodes, each node's parent process exchanges parameters while its workers train:

torchrun --nproc-per-node 2 examples/skipgram.py --workers 2 --algorithm "sgp()"
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, logsigmoid
from words import batch, read_words

import offbeat
from offbeat.hogwild import AsyncAdam, NodeReplica, launch, report_loss


class SkipGram(nn.Module):
    """Skip-gram with negative sampling (Mikolov et al. 2013): two vectors per word."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.centre = nn.Embedding(words, width, sparse=True)
        self.context = nn.Embedding(words, width, sparse=True)
        nn.init.uniform_(self.centre.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.context.weight)

    def forward(self, centres: Tensor, contexts: Tensor) -> Tensor:
        """Return the mean loss; in each row of ``contexts`` all but the first are noise."""
        around = embedding(contexts, self.context.weight, sparse=True)
        scores = (around @ self.centre(centres)[:, :, None]).squeeze(2)
        signs = torch.full_like(scores, -1.0)
        signs[:, 0] = 1.0
        return -logsigmoid(signs * scores).sum(1).mean()


def work(
    worker: int, model: SkipGram, optimizer: AsyncAdam, text: Tensor, args: argparse.Namespace
) -> list[tuple[float, float]]:
    """Run the steps of one worker; worker 0 also evaluates on a fixed batch."""
    random = torch.Generator().manual_seed(args.seed + worker)
    fixed = batch(text, 4096, torch.Generator().manual_seed(-1))
    curve, start = [], time.perf_counter()
    for step in range(args.steps // args.workers):
        if worker == 0 and step % args.report_every == 0:
            with torch.no_grad():
                loss = model(*fixed).item()
            report_loss(loss)
            curve.append((time.perf_counter() - start, loss))
        optimizer.zero_grad()
        model(*batch(text, args.batch_size, random)).backward()
        optimizer.step()
    with torch.no_grad():
        curve.append((time.perf_counter() - start, model(*fixed).item()))
    return curve


def exchange_while(optimizer: AsyncAdam, node: NodeReplica, args: argparse.Namespace) -> None:
    """Perform the exchanges that are due after the workers' steps.

    All nodes run the same number of steps and therefore of exchanges, at any speed.
    """
    while node.replica.steps < (optimizer.steps + optimizer.skipped) // args.exchange_every:
        node.step()


def main(args: argparse.Namespace) -> None:
    """Train on one node or several, and print loss over seconds."""
    torch.manual_seed(args.seed)
    text, words = read_words(args.words)
    model = SkipGram(words, args.width)
    optimizer = AsyncAdam(
        model.parameters(), lr=args.lr, moments=args.moments, workers=args.workers
    )
    together = dist.is_torchelastic_launched()
    if together:
        dist.init_process_group("gloo")
        node = NodeReplica(model, offbeat.algorithm(args.algorithm))
        args.seed += 1000 * dist.get_rank()

    def meanwhile() -> None:
        if together:
            exchange_while(optimizer, node, args)

    curve, *_ = launch(work, args.workers, (model, optimizer, text, args), meanwhile=meanwhile)
    meanwhile()  # exchanges due since the last call
    if together:
        node.finish()
        node.detach()
    if not together or dist.get_rank() == 0:
        for seconds, loss in curve:
            print(f"{seconds:7.2f} s  held-out loss {loss:.4f}")
        print(json.dumps({"steps_per_second": optimizer.steps / curve[-1][0], "curve": curve}))
    if together:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("workers", 2, "worker processes per node"),
        ("moments", "shared", "shared or private moments"),
        ("algorithm", "sgp()", "recipe between nodes, as listed by `offbeat recipes`"),
        ("exchange-every", 200, "steps between two exchanges, over a node's workers"),
        ("steps", 2000, "steps per node, over all its workers"),
        ("batch-size", 256, "centres per step"),
        ("width", 64, "dimension of a word vector"),
        ("words", 1_000_000, "number of words of text"),
        ("lr", 3e-3, "learning rate"),
        ("seed", 0, "random seed"),
        ("report-every", 100, "steps of worker 0 between two evaluations"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    main(parser.parse_args())
