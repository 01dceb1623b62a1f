"""What LAGS keeps between steps, and what travels together."""

import io
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.exchange.engine.units import Units
from offbeat.functional import count_kept, top_k
from offbeat.kernels.dispatch import each_block
from offbeat.methods.top_k.correction import Correction
from offbeat.methods.top_k.plan import MessagePlan
from offbeat.methods.top_k.sparse import SparseMessage
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World


class Tied(nn.Module):
    """One weight used twice, once inside a checkpointed block, and layers of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(20, 20, generator=generator) / 5)
        self.bias = nn.Parameter(torch.zeros(20))
        self.out = nn.Parameter(torch.randn(20, 2, generator=generator) / 5)

    def forward(self, rank: int, step: int) -> Tensor:
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        x = torch.tanh(x @ self.weight + self.bias)
        x = checkpoint(lambda x: torch.tanh(x @ self.weight.T), x, use_reentrant=False)
        return (x @ self.out).square().sum()


def kept_by(replica: offbeat.Replica) -> dict[str, Tensor]:
    saved = replica.gradients.save()
    return {f"{kind} {n}": t for kind in ("residual", "velocity") for n, t in saved[kind].items()}


def start(world: World, algorithm: offbeat.Algorithm) -> tuple[nn.Module, SGD, Any]:
    model = Tied()
    optimizer = SGD(model.parameters(), lr=0.05)
    replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
    return model, optimizer, replica


def train(model: nn.Module, optimizer: SGD, replica: Any, steps: range) -> None:
    for step in steps:
        model(replica.world.rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Kept in place now and then: what lies there must not count as new.
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        replica.step()


@pytest.mark.parametrize(
    "text",
    ["lags(0.02)", "lags(0.02, momentum=0.9)", "lags(0.02, momentum=0.9, warmup=6)", "slgs(0.02)"],
)
def test_residuals_and_velocities_of_every_rank_go_on_bit_for_bit(text: str) -> None:
    """Saved before the order is agreed on, within a warm-up and after it."""

    def worker(world: World, until: int) -> None:
        algorithm = offbeat.algorithm(text)
        model, optimizer, replica = start(world, algorithm)
        train(model, optimizer, replica, range(until))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (model, optimizer, replica)], file)
        train(model, optimizer, replica, range(until, 10))
        expected, weights = kept_by(replica), [p.detach() for p in model.parameters()]
        replica.detach()

        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model, optimizer, replica = start(world, algorithm)
        for part, state in zip((model, optimizer, replica), saved, strict=True):
            part.load_state_dict(state)
        train(model, optimizer, replica, range(until, 10))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in kept_by(replica).items())
        assert all(map(torch.equal, model.parameters(), weights))
        assert any(tensor.any() for tensor in expected.values())
        replica.detach()

    for until in (0, 1, 4, 8):
        ThreadWorld(3).run(partial(worker, until=until))


@pytest.mark.parametrize("text", ["lags(0.02)", "slgs(0.02)"])
def test_a_parameter_used_twice_loses_nothing(text: str) -> None:
    """What was handed out and what is left add up to what autograd alone finds."""

    def worker(world: World) -> dict[str, Tensor]:
        model, bare = Tied(), Tied()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        handed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for step in range(4):
            model(world.rank, step).backward()
            bare(world.rank, step).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                handed[name] += p.grad / world.size
            model.zero_grad()
            replica.step()
        left = kept_by(replica)
        replica.detach()
        return {n: handed[n] + left[f"residual {n}"] / world.size - p.grad / world.size
                for n, p in bare.named_parameters()}  # fmt: skip

    runs = ThreadWorld(3).run(worker)
    for name in runs[0]:
        off = sum(run[name] for run in runs)
        torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=1e-4)  # float32


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=12),
    density=st.floats(1e-4, 1.0),
    message=st.sampled_from([1e-5, 1e-3, 1.0]),
    whole=st.booleans(),
    wire=st.sampled_from([None, "bf16", "fp16"]),
)
@settings(max_examples=60)
def test_every_layer_travels_once_and_messages_are_as_large_as_asked_for(
    sizes: list[int],
    dtypes: list[torch.dtype],
    density: float,
    message: float,
    whole: bool,
    wire: Any,
) -> None:
    parameters = {
        str(i): torch.zeros(size, dtype=dtype)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=False))
    }
    group = SimpleNamespace(size=3, rank=1, backend=lambda device: "gloo")
    site: Any = SimpleNamespace(parameters=parameters, group=group, size=3, sparse=())
    plan = MessagePlan(site, dict.fromkeys(parameters, density), message, wire, whole)
    dense, sparse = plan.dense(list(parameters)), plan.sparse(list(parameters))
    given = site, group, Units({}, None)
    messages = [SparseMessage(*given, s, Correction(), each_block(top_k), wire) for s in sparse]
    names = [name for each in messages for name in each.names]
    assert sorted(names + [name for members in dense for name in members]) == sorted(parameters)
    for each in messages:
        flat = each.residual.next.whole
        blocks = [flat[start:end] for start, end, _ in each.blocks]
        assert sum(block.numel() for block in blocks) == flat.numel()
        sizes = [parameters[name].numel() for name in each.names]
        assert [block.numel() for block in blocks] == ([sum(sizes)] if whole else sizes)
        counts = [k for _, _, k in each.blocks]
        assert counts == [count_kept(b.numel(), density) for b in blocks]
        row = each.rows[1]
        chosen = row.values.numel()
        assert chosen == row.indices.numel() == sum(counts)
        assert row.values.itemsize == (2 if wire else flat.itemsize)
        assert len(each.blocks) == 1 or chosen * (row.values.itemsize + 4) <= message * 2**20
        # Nothing of a row lies over anything else of it, or over another rank's.
        row.values.fill_(1.0)
        row.indices.fill_(7)
        row.flags.fill_(1)
        row.scale.fill_(3.0)
        assert bool((row.values == 1.0).all())
        assert bool((row.indices == 7).all())
        assert row.scale.tolist() == ([3.0] if wire == "fp16" else [])
        assert not each.rows[0].words.any()
        assert not each.rows[2].words.any()
