"""LAGS between nodes on the gradients that FSDP2 has sharded inside them: real processes."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_sharded import (
    Results,
    attach,
    by_scenario,
    largest,
    layout,
    plain,
    sharded,
    shards,
    steps,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam

import offbeat
from offbeat.methods import Compressed, Compressor
from offbeat.transport.collectives import all_reduce
from offbeat.transport.group import Group
from problems import START, Quadratic, gradient
from ranks import Spawned
from reference.lags import lags
from reference.participants import Array

pytestmark = pytest.mark.processes


def held(local_rank: int, local: int) -> list[Array]:
    """Indices into the flat parameters of :class:`Quadratic` of what a rank holds of each."""
    found = []
    for rows in (np.arange(6).reshape(2, 3), np.arange(6, 9).reshape(3, 1)):
        each = -(-len(rows) // local)
        found.append(rows[each * local_rank : each * (local_rank + 1)].ravel())
    return found


def follow(rank: int, results: Any, local: int, cases: Any) -> None:
    mesh = layout(local)
    for name, text, rates, given in cases:
        model = Quadratic()
        fully_shard(model, mesh=mesh["local"])
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        replica = offbeat.replicate(
            model, offbeat.algorithm(text), mesh=mesh, optimizer=optimizer if given else None
        )
        history = []
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            model(rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            mine, residual = shards(model), replica.gradients.save()["residual"]
            history.append(
                [torch.cat([t[n].view(-1) for n in residual]).tolist() for t in (mine, residual)]
            )
        results.put(("follow", (name, rank, history)))
        replica.detach()


RATES = [0.1 / (1 + k) for k in range(20)]
CASES = (
    ("lr units", "lags(density=0.4)", RATES, True),
    ("gradient units", "lags(density=0.4, selection='exact')", RATES, False),
    ("correction", "lags(density=0.4, momentum=0.9)", [0.05] * 20, True),
    ("whole model", "slgs(density=0.4)", RATES, True),
)


@pytest.mark.parametrize(
    ("ran", "local", "cases"),
    [("on_four", 2, CASES), ("on_six", 3, CASES[::3])],
    ids=["2x2", "2x3"],
)
def test_a_shard_is_a_layer_of_the_reference(
    ran: str, local: int, cases: Any, request: pytest.FixtureRequest
) -> None:
    """Shards of 3, 2, 1 and 0 entries; a node is a rank of the reference, with its mean.

    The reference has the entries in the order of the ranks that hold them.
    """
    results = request.getfixturevalue(ran)["follow"]
    parts = [held(rank, local) for rank in range(local)]
    order = np.concatenate([np.concatenate(mine) for mine in parts])
    ends = np.cumsum([0, *(sum(map(len, mine)) for mine in parts)])

    def of_node(node: int, z: Array, step: int) -> Array:
        ranks = range(node * local, (node + 1) * local)
        whole = np.empty_like(z)
        whole[order] = z
        return np.mean([gradient(rank, whole, step) for rank in ranks], axis=0)[order]

    assert len(results) == len(cases) * local * 2
    for name, _, rates, given in cases:
        sizes = [list(map(len, mine)) for mine in parts]
        whole = name == "whole model"
        layers = [d for mine in sizes for d in ([sum(mine)] if whole else mine)]
        expected = lags(
            START[order],
            of_node,
            nodes=((0,), (1,)),
            steps=20,
            lr=rates,
            layers=[size for size in layers if size],
            density=0.4,
            correction=0.9 if name == "correction" else 0.0,
            lr_units=given,
        )
        for rank, history in [(rank, found) for other, rank, found in results if other == name]:
            mine = slice(ends[rank % local], ends[rank % local + 1])
            for found, reference in zip(np.array(history).swapaxes(0, 1), expected, strict=True):
                np.testing.assert_allclose(
                    found, reference[1:, rank // local, mine], rtol=0, atol=1e-12, err_msg=name
                )


SIZES = ((24, 3, 10, 2, 8, 2), (16, 2, 10, 2, 4, 1))


def small(dtype: torch.dtype) -> nn.Module:
    """Shards of :data:`SIZES` entries; the last two layers are one block of FSDP2."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return net.to(dtype)


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.05)


class Loop:
    """A training loop, written as letters, of a model that FSDP2 shards over two ranks.

    b is a backward, B one whose gradient will be discarded, m one that FSDP2 does not reduce and n
    one that offbeat does not exchange. z clears all gradients, c clips them, o is an optimizer's
    step and s the replica's. With ``hidden``, no B is exchanged.
    """

    def __init__(
        self,
        text: str | offbeat.Algorithm,
        *,
        make: Callable[[Any], Any] = sgd,
        given: bool = True,
        hidden: bool = False,
        to_none: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        mesh = layout(2)
        self.model, self.dtype = small(dtype), dtype
        for block in (self.model[0], self.model):
            fully_shard(block, mesh=mesh["local"])
        self.optimizer = make(self.model.parameters())
        self.replica = offbeat.replicate(
            self.model,
            offbeat.algorithm(text),
            mesh=mesh,
            optimizer=self.optimizer if given else None,
        )
        self.hidden, self.to_none, self.count = hidden, to_none, 0

    def run(self, letters: str) -> list[Tensor]:
        """Return shards, residuals and velocities."""
        actions = {
            "z": lambda: self.model.zero_grad(set_to_none=self.to_none),
            "c": lambda: nn.utils.clip_grad_norm_(self.model.parameters(), 0.1),
            "o": self.optimizer.step,
            "s": self.replica.step,
        }
        for letter in letters:
            if letter in actions:
                actions[letter]()
                continue
            self.model.set_requires_gradient_sync(letter != "m")
            self.replica.set_requires_sync(letter == "b" or (letter == "B" and not self.hidden))
            self.count += 1
            self.backward(self.model, -5.0 if letter == "B" else 1.0)
        saved = self.replica.gradients.save()
        kept = [*saved["residual"].values(), *saved.get("velocity", {}).values()]
        return [*shards(self.model).values(), *kept]

    def backward(self, model: nn.Module, weight: float) -> None:
        seed = 1000 * dist.get_rank() + self.count
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        (weight * model(x).square().mean()).backward()


class Rounded(Compressor):
    """Sends numbers rounded to bfloat16."""

    def __init__(self, like: Tensor, group: Group) -> None:
        assert like.numel() > 0
        self.group = group

    def launch(self, acc: Tensor) -> Tensor:
        sent = acc.bfloat16().to(acc.dtype)
        self.mean = sent / self.group.size
        self.handle = all_reduce(self.mean, self.group)
        return sent

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.mean


ROUNDED = offbeat.Algorithm(gradients=Compressed(compressor=Rounded, message_mb=1e-5))
DISCARDED = ("BzbozsBBzbbozsbozsBzs", "BzbozsbozBzsbozsBzBzBzbozsBzBBzbbozsBczbcozsbozsBzs")
LOOPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "given": ("lags(0.1)", {}),
    "correction": ("lags(0.1, momentum=0.9)", {"to_none": False}),
    "bf16": ("lags(0.1)", {"dtype": torch.bfloat16}),
    "Adam": ("lags(0.1)", {"make": partial(Adam, lr=0.01), "given": False}),
    "slgs": ("slgs(0.1)", {}),
    "compressor": (ROUNDED, {}),
}


def discarding(rank: int, results: Any) -> None:
    for name, (text, settings) in LOOPS.items():
        ends = []
        for hidden in (False, True):
            loop = Loop(text, hidden=hidden, **settings)
            ends.append(loop.run(DISCARDED[name == "given"] + "zbozs"))
            loop.replica.detach()
        equal = all(map(torch.equal, *ends))
        results.put(("discarding", (name, equal, any(k.any() for k in ends[0][len(SIZES[0]) :]))))


@pytest.mark.fault(
    "a script discards a gradient of a sharded model under lags",
    "residuals as before that backward",
    group="Gradients",
)
def test_discarded_gradients_of_a_sharded_model_train_nothing(on_four: Results) -> None:
    """Bit for bit as if they had not been exchanged."""
    assert sorted(on_four["discarding"]) == sorted(
        (name, True, True) for name in LOOPS for _ in range(4)
    )


STAYING = [(letters, torch.float64) for letters in ("bmb", "bnsb", "mb", "bsbsnb")]
STAYING += [("bnb", torch.bfloat16)]


def staying(rank: int, results: Any) -> None:
    for case, (letters, dtype) in enumerate(STAYING):
        loop = Loop("lags(0.1)", given=False, dtype=dtype)
        before = loop.run("bozs")[len(SIZES[0]) :]
        bare = sharded_twin(loop.model, loop.dtype)
        for letter in letters:
            loop.run(letter)
            if letter != "s":
                loop.backward(bare, 1.0)
        parts = zip(
            loop.run("")[len(SIZES[0]) :], before, *map(gradients, (loop.model, bare)), strict=True
        )
        off = [g.double() + after - old - b.double() for after, old, g, b in parts]
        results.put(("staying", (case, rank, [tensor.tolist() for tensor in off])))
        loop.replica.detach()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]


def sharded_twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = small(dtype)
    for block in (twin[0], twin):
        fully_shard(block, mesh=layout(2)["local"])
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    return twin


def test_what_stays_in_grad_and_what_is_left_add_up_to_all_gradients(on_four: Results) -> None:
    """Over the nodes, whatever was accumulated by FSDP2, by us and in several exchanges."""
    results = on_four["staying"]
    assert len(results) == 4 * len(STAYING)
    for number, (letters, dtype) in enumerate(STAYING):
        found = {rank: off for case, rank, off in results if case == number}
        for one, other in ((found[0], found[2]), (found[1], found[3])):
            for a, b in zip(one, other, strict=True):
                total = np.abs(np.array(a) + np.array(b)).max()
                assert total <= (1e-12 if dtype == torch.float64 else 0.01), (letters, dtype)


def dense(rank: int, results: Any) -> None:
    mesh, ends = layout(2), []
    for text in ("ddp", "lags(density=1.0)"):
        model = sharded(plain(), mesh["local"])
        optimizer, replica = attach(model, text, mesh)
        for _ in steps(model, optimizer, replica, range(20)):
            pass
        ends.append(shards(model))
        replica.detach()
    results.put(("dense", largest(*ends)))


def test_a_density_of_one_is_ddp(on_four: Results) -> None:
    """Of a model with tied, frozen and empty parts."""
    results = on_four["dense"]
    assert len(results) == 4
    assert max(results) <= 1e-12


class Rows(nn.Module):
    """The last of four rows, of the second rank of a node, gets a gradient that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(40.0).view(4, 10) / 40)

    def forward(self, rank: int, value: float) -> Tensor:
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(rank))
        x[3, 0] *= value
        return (self.weight * x).square().sum()


def overflow(rank: int, results: Any) -> None:
    mesh = layout(2)
    for text in ("lags(density=0.1)", "lags(density=1.0)", "rounded"):
        model = fully_shard(Rows(), mesh=mesh["local"])
        algorithm = ROUNDED if text == "rounded" else offbeat.algorithm(text)
        replica = offbeat.replicate(model, algorithm, mesh=mesh)
        found = []
        for step in range(4):
            before = copy.deepcopy(replica.gradients.save()["residual"]["weight"])
            model(rank, torch.inf if (step, rank) == (2, 1) else 1.0).backward()
            after, grad = replica.gradients.save()["residual"]["weight"], gradients(model)[0]
            found.append((bool(grad.isnan().all()), bool(grad.isfinite().all())))
            found[-1] += (torch.equal(before, after) and text != "lags(density=1.0)",)
            model.zero_grad()
            replica.step()
        results.put(("overflow", (text, found)))
        replica.detach()


@pytest.mark.fault(
    "a gradient of one shard is NaN or infinite under lags",
    "residuals as before; all gradients become NaN",
    group="Gradients",
)
def test_an_overflow_in_one_shard_undoes_the_selection_in_all(on_four: Results) -> None:
    results = on_four["overflow"]
    assert len(results) == 12
    for text, found in results:
        undone = text != "lags(density=1.0)"
        assert found[2] == (True, False, undone), text
        assert [f for i, f in enumerate(found) if i != 2] == 3 * [(False, True, False)], text


def counted(rank: int, results: Any) -> None:
    loop = Loop("lags(density=0.1)")
    loop.run("bozs" * 3)
    before = loop.replica.stats()["bytes_by_axis"]
    loop.run("bozs")
    after = loop.replica.stats()["bytes_by_axis"]
    memory = [grad.data_ptr() for grad in gradients_after(loop, "b")]
    again = [grad.data_ptr() for grad in gradients_after(loop, "ozsb")]
    results.put(("counted", (rank, after["node"] - before["node"], memory == again)))
    loop.replica.detach()


def gradients_after(loop: Loop, letters: str) -> list[Tensor]:
    loop.run(letters)
    return gradients(loop.model)


def test_what_a_node_sends_and_which_memory_it_uses(on_four: Results) -> None:
    results = on_four["counted"]
    assert all(same for *_, same in results)
    for rank, sent, _ in results:
        kept = [(d, max(1, d // 10)) for d in SIZES[rank % 2]]
        whole = [d for d, k in kept if d <= 2 * k]  # costs no more
        sparse = [k for d, k in kept if d > 2 * k]
        # Values, indices, a flag for each shard and two more, in an even number of words.
        words = 2 * sum(sparse) + len(sparse) + 2
        words += words % 2
        assert sent == 4 * words + 4 * (sum(whole) + len(whole) + 1), (rank, sent)


def resumed(rank: int, results: Any, folder: str) -> None:
    for text in ("lags(0.1, momentum=0.9, warmup=4)", "slgs(0.1)", "rounded"):
        algorithm = ROUNDED if text == "rounded" else text
        path = Path(folder) / text
        loop = Loop(algorithm)
        loop.run("bozs" * 3 + "bozsBzs")
        saved = copy.deepcopy(loop.model.state_dict())
        offbeat.save_per_rank(path, replica=loop.replica, optimizer=loop.optimizer)
        again = Loop(algorithm)
        again.count = loop.count
        again.model.load_state_dict(saved)
        offbeat.load_per_rank(path, replica=again.replica, optimizer=again.optimizer)
        ends = [each.run("zbozs" * 3) for each in (loop, again)]
        results.put(("resumed", (text, all(map(torch.equal, *ends)))))
        loop.replica.detach()
        again.replica.detach()


def more_nodes(rank: int, results: Any, folder: str) -> None:
    loop = Loop("slgs(0.1)")
    offbeat.load_per_rank(
        Path(folder) / "slgs(0.1)", replica=loop.replica, optimizer=loop.optimizer
    )
    residual = loop.replica.gradients.save()["residual"]
    results.put(("more_nodes", (rank, {name: r.tolist() for name, r in residual.items()})))
    loop.run("bozs")
    loop.replica.detach()


def test_a_resumed_run_equals_the_uninterrupted_one(on_four: Results) -> None:
    results = on_four["resumed"]
    assert len(results) == 12
    assert all(equal for _, equal in results), results


def test_more_nodes_inherit_the_mean_residuals_of_their_shards(
    folder: Path, on_six: Results
) -> None:
    files = [
        torch.load(folder / "slgs(0.1)" / f"offbeat-save1-rank{rank}-of-4.pt") for rank in range(4)
    ]
    saved = [f["replica"][f"rank{r}"]["gradients"]["residual"] for r, f in enumerate(files)]
    assert len(on_six["more_nodes"]) == 6
    for rank, residual in on_six["more_nodes"]:
        for name, values in residual.items():
            mean = (saved[rank % 2][name] + saved[rank % 2 + 2][name]) / 2
            np.testing.assert_array_equal(values, mean.numpy(), err_msg=name)


def adapted(rank: int, results: Any) -> None:
    loop = Loop("lags(density='adaptive', max_ratio=5.0, retune=8)")
    loop.run("bozs" * 20)
    found = loop.replica.stats()["lags"]
    results.put(("adapted", (rank, found["c"], found["t_comp"])))
    loop.replica.detach()


def test_adaptive_densities_are_those_of_the_ranks_that_exchange(on_four: Results) -> None:
    results = sorted(on_four["adapted"])
    assert results[0][1:] == results[2][1:]
    assert results[1][1:] == results[3][1:]
    assert results[0][2] != results[1][2], "these ranks exchange other shards"


def run_four(rank: int, results: Any, folder: str) -> None:
    """Run all that two nodes of two ranks show: starting processes takes most of the time."""
    follow(rank, results, 2, CASES)
    for scenario in (discarding, staying, dense, overflow, counted, adapted):
        scenario(rank, results)
    resumed(rank, results, folder)


def run_six(rank: int, results: Any, folder: str) -> None:
    follow(rank, results, 3, CASES[::3])
    more_nodes(rank, results, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the four ranks save and the six load."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def on_four(folder: Path) -> Results:
    return by_scenario(Spawned(run_four, 4, str(folder)).join(110))


@pytest.fixture(scope="module")
def on_six(folder: Path, on_four: Results) -> Results:
    return by_scenario(Spawned(run_six, 6, str(folder)).join(100))
