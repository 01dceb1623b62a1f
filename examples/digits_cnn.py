"""Train a convolutional network with BatchNorm on images of digits.

torchrun --nproc-per-node 4 examples/digits_cnn.py --algorithm "local_sgd(every=8)"
"""

import argparse
from pathlib import Path

import digits
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat


def net() -> nn.Module:
    """Build two blocks of convolution, BatchNorm and pooling, then two linear layers."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Linear(32 * 5 * 5, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*block(1, 16), *block(16, 32), *head)


def load(args: argparse.Namespace) -> tuple[digits.Images, digits.Images]:
    """Return training and held-out images."""
    if args.data_dir:
        return digits.mnist(Path(args.data_dir))
    if args.data == "scanned":
        return digits.small()
    return digits.generated(args.train_size, seed=0), digits.generated(args.train_size // 6, seed=1)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    model.eval()
    logits = torch.cat([model(part) for part in images.split(500)])
    model.train()
    return cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def main(args: argparse.Namespace) -> None:
    """Train, then evaluate the averaged model."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if dist.is_torchelastic_launched() else alone))
    rank, world = dist.get_rank(), dist.get_world_size()
    (images, labels), held_out = load(args)
    images, labels = images[rank::world], labels[rank::world]  # disjoint shares
    torch.manual_seed(args.seed + rank)
    model = net()
    replica = offbeat.replicate(model, offbeat.algorithm(args.algorithm))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(len(images), (args.batch_size,))
        loss = cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        replica.report_loss(loss)
        replica.step()
        if rank == 0 and step % args.report_every == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    replica.finish()
    heldout, accuracy = evaluate(model, *held_out)
    replica.report_loss(heldout, "heldout")
    if rank == 0:
        print(f"held-out loss {heldout:.4f}  accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("algorithm", "ddp()", "recipe, as listed by `offbeat recipes`"),
        ("steps", 300, "optimizer steps"),
        ("batch-size", 32, "images per rank and step"),
        ("lr", 0.05, "peak learning rate"),
        ("seed", 0, "random seed; the rank is added to it"),
        ("report-every", 50, "steps between reports"),
        ("data", "generated", "generated or scanned (scikit-learn's digits)"),
        ("train-size", 60000, "number of generated training images"),
        ("data-dir", "", "folder with the MNIST files; replaces --data"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    main(parser.parse_args())
