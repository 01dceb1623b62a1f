"""Train a classifier of scikit-learn's digits with Ray Train; a second start resumes the run.

python examples/ray_train.py --algorithm "sgp(overlap=1)" --workers 2
"""

import argparse
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat
from offbeat.integrations.ray import report, resume


def data(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Load images of 8 x 8 pixels, labels, and which of them are held out: every fifth."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    return images, torch.tensor(labels, device=device), torch.arange(len(images)) % 5 == 4


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return mean loss and accuracy."""
    logits = model(images)
    right = (logits.argmax(1) == labels).float().mean()
    return {"heldout_loss": cross_entropy(logits, labels).item(), "accuracy": right.item()}


def train(config: dict[str, Any]) -> None:
    """Run on every worker: train on a share of the data, and report an average every so often."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    images, labels, held = data(get_device())
    held_out = images[held], labels[held]
    images, labels = images[~held][rank::world], labels[~held][rank::world]

    bare = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = prepare_model(bare, parallel_strategy=None)  # to the device, without DDP
    optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    algorithm = offbeat.algorithm(config["algorithm"])
    replica = offbeat.replicate(model, algorithm, optimizer=optimizer)
    parts = {"replica": replica, "optimizer": optimizer, "schedule": schedule}
    if resume(**parts) and rank == 0:
        print(f"resumed after step {replica.steps}")

    for step in range(replica.steps, config["steps"]):
        # A generator of the step alone: a resumed run sees the batches of an uninterrupted one.
        random = torch.Generator().manual_seed(1000 * config["seed"] + step)
        chosen = torch.randint(len(images), (config["batch_size"],), generator=random)
        loss = cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        replica.report_loss(loss)
        replica.step()
        is_last = step + 1 == config["steps"]
        if is_last:
            replica.finish()  # on every worker: the last checkpoint holds equal models
        if is_last or (step + 1) % config["report_every"] == 0:
            with replica.consensus():
                metrics = evaluate(model, *held_out)
            report({"step": step + 1, "loss": loss.item()} | metrics, **parts)
    replica.detach()


def main(args: argparse.Namespace) -> None:
    """Start the workers, wait for them, and print what they reported last."""
    # Ray waits until there is a CPU for each worker, and this machine gets no more of them.
    ray.init(args.address, num_cpus=args.workers if args.address == "local" else None)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if args.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage or None,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    metrics = trainer.fit().metrics or {}
    print(f"held-out loss {metrics['heldout_loss']:.4f}  accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("algorithm", "sgp(overlap=1)", "recipe, as listed by `offbeat recipes`"),
        ("workers", 2, "number of workers"),
        ("storage", "", "absolute path or URL for checkpoints, by default ~/ray_results"),
        ("name", "digits", "name of the run; one that exists is resumed"),
        ("address", "local", "'local' starts Ray on this machine, 'auto' joins its cluster"),
        ("steps", 300, "optimizer steps"),
        ("batch-size", 32, "images per worker and step"),
        ("lr", 0.05, "learning rate of the first step"),
        ("seed", 0, "random seed"),
        ("report-every", 100, "steps between reports"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    parser.add_argument("--gpus", action="store_true", help="use one GPU per worker")
    main(parser.parse_args())
