"""Train a small U-Net to segment generated images of shapes.

torchrun --nproc-per-node 4 examples/segmentation.py --algorithm "daso(total_steps=300)"
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import offbeat

Pictures = tuple[Tensor, Tensor]  # (n, 1, size, size), and (n, size, size) classes
CLASSES, SHAPES = 4, 5  # background, disc, square, diamond; shapes per image


def pictures(count: int, seed: int, size: int = 32) -> Pictures:
    """Generate images of discs, squares and diamonds with random brightness and noise.

    Deterministic for a given seed. The class depends on the outline alone.
    """
    random = torch.Generator().manual_seed(seed)
    ticks = torch.arange(size).float()
    image, target = torch.zeros(count, size, size), torch.zeros(count, size, size).long()
    for _ in range(SHAPES):
        kind = torch.randint(1, CLASSES, (count, 1, 1), generator=random)
        across, down = size * torch.rand(2, count, 1, generator=random)
        radius = size * (0.12 + 0.13 * torch.rand(count, 1, 1, generator=random))
        light = 0.3 + 0.7 * torch.rand(count, 1, 1, generator=random)
        x, y = (ticks - across).abs()[:, None, :], (ticks - down).abs()[:, :, None]
        disc, square, diamond = torch.hypot(x, y), 1.13 * torch.maximum(x, y), 0.8 * (x + y)
        distance = torch.where(kind == 1, disc, torch.where(kind == 2, square, diamond))
        inside = distance < radius  # equal area for all three
        image, target = torch.where(inside, light, image), torch.where(inside, kind, target)
    return (image + 0.1 * torch.randn(image.shape, generator=random))[:, None], target


class UNet(nn.Module):
    """Two levels of downsampling and upsampling with skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())

        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for level in self.down:
            seen.append(level(x))
            x = nn.functional.max_pool2d(seen[-1], 2)
        x = self.bottom(x)
        for level in self.up:
            x = level(torch.cat([interpolate(x, scale_factor=2.0), seen.pop()], 1))
        return self.head(x)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, target: Tensor) -> tuple[float, float]:
    """Return the mean loss and the intersection over union, averaged over classes."""
    model.eval()
    logits = torch.cat([model(part) for part in images.split(100)])
    model.train()
    pairs = (CLASSES * target + logits.argmax(1)).flatten().bincount(minlength=CLASSES**2)
    table = pairs.view(CLASSES, CLASSES).double()
    union = table.sum(0) + table.sum(1) - table.diag()
    return cross_entropy(logits, target).item(), (table.diag() / union).nanmean().item()


def main(args: argparse.Namespace) -> None:
    """Train, then evaluate the averaged model."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if dist.is_torchelastic_launched() else alone))
    rank, world = dist.get_rank(), dist.get_world_size()
    images, target = pictures(args.train_size // world, seed=1 + rank)  # disjoint data
    torch.manual_seed(args.seed + rank)
    model = UNet()
    replica = offbeat.replicate(model, offbeat.algorithm(args.algorithm))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(len(images), (args.batch_size,))
        loss = cross_entropy(model(images[chosen]), target[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        replica.report_loss(loss)
        replica.step()
        if rank == 0 and step % args.report_every == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    replica.finish()
    heldout, iou = evaluate(model, *pictures(200, seed=0))
    replica.report_loss(heldout, "heldout")
    if rank == 0:
        print(f"held-out loss {heldout:.4f}  mean IoU {iou:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("algorithm", "ddp()", "recipe, as listed by `offbeat recipes`"),
        ("steps", 300, "optimizer steps"),
        ("batch-size", 8, "images per rank and step"),
        ("lr", 0.2, "peak learning rate"),
        ("seed", 0, "random seed; the rank is added to it"),
        ("report-every", 50, "steps between reports"),
        ("train-size", 4000, "training images over all ranks"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    main(parser.parse_args())
