"""Asynchronous Adam in one process: what one worker does, and workers in turns."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offbeat.hogwild import AsyncAdam
from reference.async_adam import async_adam

SPARSE = torch.float64, torch.float32, torch.bfloat16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}  # rounding


def gradient(step: int, rows: int = 7, width: int = 3) -> Tensor:
    """A sparse gradient whose rows repeat and of which single coordinates are zero."""
    random = torch.Generator().manual_seed(step)
    where = torch.randint(rows, (5,), generator=random)
    values = torch.randn(5, width, generator=random, dtype=torch.float64)
    values[torch.rand(5, width, generator=random) < 0.2] = 0.0
    return torch.sparse_coo_tensor(where[None], values, (rows, width), check_invariants=True)


def weight(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    random = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(7, 3, generator=random, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize(
    ("moments", "correction", "dense"),
    [("shared", "step", False), ("private", "coordinate", False), ("shared", "coordinate", True)],
)
@pytest.mark.parametrize("dtype", SPARSE)
def test_one_worker_follows_the_reference(
    dtype: torch.dtype, moments: str, correction: str, dense: bool
) -> None:
    parameter = weight(dtype)
    start = parameter.detach().double().flatten().numpy().copy()
    optimizer = AsyncAdam(
        [parameter], lr=0.1, weight_decay=0.3, moments=moments, bias_correction=correction
    )
    steps = []
    for t in range(1, 21):
        g = gradient(t).to(dtype)
        steps.append((0, t, g.to_dense().double().flatten().numpy()))
        parameter.grad = g.to_dense() if dense else g
        optimizer.step()
    theta, m, v = async_adam(
        start, steps, workers=1, private=moments == "private", alpha=0.1, weight_decay=0.3,
        by_coordinate=correction == "coordinate",
    )  # fmt: skip
    state, atol = optimizer.state[parameter], TOLERANCE[dtype] * 10
    np.testing.assert_allclose(parameter.detach().double().flatten(), theta, rtol=0, atol=atol)
    np.testing.assert_allclose(state["exp_avg"].double().flatten(), m[0], rtol=0, atol=atol)
    np.testing.assert_allclose(state["exp_avg_sq"].double().flatten(), v[0], rtol=0, atol=atol)


def test_one_worker_equals_sparse_adam_on_the_touched_coordinates() -> None:
    ours, theirs = weight(), weight()
    optimizer = AsyncAdam([ours], lr=0.05)
    baseline = torch.optim.SparseAdam([theirs], lr=0.05)
    for step in range(30):
        g = gradient(step)
        g._values()[g._values() == 0.0] = 1e-3  # SparseAdam moves whole rows
        ours.grad, theirs.grad = g, g.clone()
        optimizer.step()
        baseline.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1e19, 5e20])
def test_a_gradient_whose_square_overflows_counts_as_in_torch(size: float) -> None:
    ours, theirs = weight(torch.float32), weight(torch.float32)
    optimizers = AsyncAdam([ours], lr=0.05), torch.optim.Adam([theirs], lr=0.05)
    for g in (size, 1.0, 1.0):
        ours.grad, theirs.grad = (torch.full((7, 3), g) for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    second, expected = optimizers[0].state[ours], optimizers[1].state[theirs]
    torch.testing.assert_close(second["exp_avg_sq"], expected["exp_avg_sq"])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", SPARSE)
def test_untouched_coordinates_keep_everything_bit_for_bit(dtype: torch.dtype, dense: bool) -> None:
    parameter = weight(dtype)
    optimizer = AsyncAdam([parameter], lr=0.1, weight_decay=0.1)
    for step in range(5):
        parameter.grad = gradient(step).to(dtype)
        optimizer.step()
    state = optimizer.state[parameter]
    tensors = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
    before = [tensor.clone() for tensor in tensors]
    g = gradient(9).to(dtype)
    parameter.grad = g.to_dense() if dense else g
    optimizer.step()
    untouched = g.to_dense() == 0
    assert 0 < untouched.sum() < untouched.numel()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[untouched], old[untouched])
        assert (tensor != old)[~untouched].all()


@pytest.mark.parametrize("correction", ["step", "coordinate"])
def test_a_number_is_a_parameter_in_every_dtype(correction: str) -> None:
    for dtype in SPARSE:
        number = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        number.grad = torch.tensor(-3.0, dtype=dtype)
        AsyncAdam([number], lr=0.25, eps=1e-30, bias_correction=correction).step()
        assert number.item() == pytest.approx(2.25, abs=TOLERANCE[dtype])


@pytest.mark.parametrize("places", [0, 1, 1000])
def test_a_sparse_gradient_equals_its_dense_sum(places: int) -> None:
    """Many rows, most of them more than once: all chains of the hash table, of any length."""
    random = torch.Generator().manual_seed(places)
    where = torch.randint(300, (1, places), generator=random)
    values = torch.randn(places, 17, generator=random)
    sparse, dense = (nn.Parameter(torch.zeros(300, 17)) for _ in range(2))
    sparse.grad = torch.sparse_coo_tensor(where, values, (300, 17), check_invariants=True)
    dense.grad = sparse.grad.to_dense()
    AsyncAdam([sparse, dense], lr=0.1).step()
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-6)
    assert (sparse != 0).any(1).sum() == len(where.unique())


def test_the_first_step_has_its_size() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = AsyncAdam([parameter], lr=0.1, betas=(0.8, 0.99), eps=0.0)
    parameter.grad = torch.tensor([3.0, 0.0], dtype=torch.float64)
    optimizer.step()
    step_size = 0.1 * np.sqrt(1 - 0.99) / (1 - 0.8)
    m, v = (1 - 0.8) * 3.0, (1 - 0.99) * 9.0
    np.testing.assert_allclose(parameter.detach(), [-step_size * m / np.sqrt(v), 0], rtol=1e-14)


@pytest.mark.parametrize(("moments", "correction"), [("shared", "coordinate"), ("private", "step")])
def test_workers_in_turns_follow_the_reference(moments: str, correction: str) -> None:
    parameter = weight()
    start = parameter.detach().flatten().numpy().copy()
    settings = {"moments": moments, "bias_correction": correction}
    optimizer = AsyncAdam([parameter], lr=0.1, workers=3, **settings)
    workers = [optimizer.as_worker(number) for number in range(3)]
    random = [worker._random.getstate() for worker in workers]
    steps = []
    for k in range(30):
        number = k * 7 % 3
        parameter.grad = gradient(k)
        workers[number].step()
        before = sum(w == number for w, *_ in steps)
        t = before + 1
        if moments == "shared":  # the time that the worker drew
            own = workers[number]._random
            now = own.getstate()
            own.setstate(random[number])
            t = before * 3 + 1 + own.randrange(3)
            random[number] = now
        steps.append((number, t, gradient(k).to_dense().flatten().numpy()))
    theta, m, v = async_adam(
        start, steps, workers=3, private=moments == "private", alpha=0.1,
        by_coordinate=correction == "coordinate",
    )  # fmt: skip
    state = optimizer.state[parameter]
    np.testing.assert_allclose(parameter.detach().flatten(), theta, rtol=0, atol=1e-12)
    shape = m.shape if moments == "private" else (1, -1)
    np.testing.assert_allclose(state["exp_avg"].reshape(shape), m, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["exp_avg_sq"].reshape(shape), v, rtol=0, atol=1e-12)
    assert optimizer.steps == 30


def test_private_moments_are_those_of_independent_adams() -> None:
    parameter = weight()
    optimizer = AsyncAdam([parameter], lr=0.0, moments="private", workers=2)
    alone = [weight() for _ in range(2)]
    adams = [torch.optim.SparseAdam([p], lr=1e-9) for p in alone]
    for k in range(20):
        number = k % 2
        g = gradient(k)
        g._values()[g._values() == 0.0] = 1e-3
        parameter.grad, alone[number].grad = g, g.clone()
        optimizer.as_worker(number).step()
        adams[number].step()
    for number in range(2):
        theirs = adams[number].state[alone[number]]
        ours = optimizer.state[parameter]
        torch.testing.assert_close(ours["exp_avg"][number], theirs["exp_avg"])
        torch.testing.assert_close(ours["exp_avg_sq"][number], theirs["exp_avg_sq"])


@pytest.mark.parametrize("workers", [1, 4])
def test_time_starts_at_one_and_covers_all_workers(workers: int) -> None:
    parameter = weight()
    worker = AsyncAdam([parameter], workers=workers).as_worker(0)
    times = [worker._tick(worker._target(parameter, 0)) for _ in range(200)]
    assert all(k * workers < t <= (k + 1) * workers for k, t in enumerate(times))
    assert len({(t - 1) % workers for t in times}) == workers


@pytest.mark.parametrize(
    ("dtype", "bad"), [*zip(SPARSE, (float("nan"), float("inf"), -float("inf")), strict=True)]
)
@pytest.mark.fault(
    "a gradient of a worker is NaN or infinite", "the worker skips the step and counts it"
)
def test_a_non_finite_gradient_skips_the_whole_step_and_counts(
    dtype: torch.dtype, bad: float
) -> None:
    sparse, dense = weight(dtype), weight(dtype)
    optimizer = AsyncAdam([dense, sparse], lr=0.1)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    dense.grad, sparse.grad = torch.ones_like(dense), gradient(0).to(dtype)
    sparse.grad._values()[-1, -1] = bad
    optimizer.step()
    assert (optimizer.steps, optimizer.skipped) == (0, 1)
    assert torch.equal(dense, weight(dtype))
    assert torch.equal(sparse, weight(dtype))
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], before[index][name]) for name in state)


def test_groups_closures_and_schedulers() -> None:
    slow, fast = weight(), weight()
    groups = [{"params": [slow]}, {"params": [fast], "lr": 0.2, "weight_decay": 0.0}]
    optimizer = AsyncAdam(groups, lr=0.1, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (slow.sum() + fast.sum()).square()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    assert optimizer.step(closure) < first
    assert not torch.equal(slow, fast)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", SPARSE)
def test_a_coordinate_met_late_moves_by_the_step_size(dtype: torch.dtype, sparse: bool) -> None:
    """By the time of the optimizer, these steps would be 3 to 7 times as long."""
    parameter = nn.Parameter(torch.zeros(2, 1, dtype=dtype))
    optimizer = AsyncAdam([parameter], lr=0.01, eps=0.0, bias_correction="coordinate")
    for row, steps in ((0, 300), (1, 12)):
        for _ in range(steps):
            g = torch.tensor([[2.0 * (row == 0)], [2.0 * (row == 1)]], dtype=dtype)
            parameter.grad = g.to_sparse(1) if sparse else g
            optimizer.step()
    moved = -parameter.detach()[1].double().item()
    assert moved == pytest.approx(0.12, rel=3 * TOLERANCE[dtype])
    assert optimizer.state[parameter]["updates"].flatten().tolist() == [300, 12]


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_count_of_updates_stays_at_the_largest_number(is_contiguous: bool) -> None:
    """By a kernel, and by torch."""
    shape = torch.zeros(2, 3) if is_contiguous else torch.zeros(3, 2).t()
    weight = nn.Parameter(shape)
    optimizer = AsyncAdam([weight], lr=0.1, bias_correction="coordinate")
    counts = optimizer.state[weight]["updates"]
    counts.fill_(2**31 - 2)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(counts, torch.full_like(counts, 2**31 - 1))
    assert weight.isfinite().all()


@pytest.mark.parametrize(("moments", "correction"), [("shared", "step"), ("private", "coordinate")])
def test_saving_loading_and_continuing_equals_never_stopping(moments: str, correction: str) -> None:
    straight, resumed = weight(), weight()
    settings = {"moments": moments, "bias_correction": correction}
    optimizer = AsyncAdam([straight], lr=0.1, **settings)
    for step in range(10):
        straight.grad = gradient(step)
        optimizer.step()
        if step == 4:
            saved = copy.deepcopy(optimizer.state_dict())
            resumed.data.copy_(straight)
    again = AsyncAdam([resumed], lr=1.0, **settings)
    addresses = [tensor.data_ptr() for tensor in again.state[resumed].values()]
    again.load_state_dict(saved)
    for step in range(5, 10):
        resumed.grad = gradient(step)
        again.step()
    assert torch.equal(straight, resumed)
    assert (optimizer.steps, again.steps) == (10, 10)
    # Workers that hold the old memory would not see new tensors.
    assert [tensor.data_ptr() for tensor in again.state[resumed].values()] == addresses


def test_loaded_counts_are_not_rounded_to_the_dtype_of_the_parameter() -> None:
    saved, loaded = (
        AsyncAdam([weight(torch.bfloat16)], bias_correction="coordinate") for _ in range(2)
    )
    counts = [next(iter(optimizer.state.values()))["updates"] for optimizer in (saved, loaded)]
    counts[0].fill_(257)  # 256 in bfloat16
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(*counts)


def test_all_state_is_shared_before_the_first_step() -> None:
    parameter = weight()
    optimizer = AsyncAdam([parameter], moments="private", workers=3, bias_correction="coordinate")
    assert parameter.is_shared()
    assert {name: tuple(t.shape) for name, t in optimizer.state[parameter].items()} == {
        "step": (3, 8), "exp_avg": (3, 7, 3), "exp_avg_sq": (3, 7, 3), "updates": (3, 7, 3)
    }  # fmt: skip
    assert all(tensor.is_shared() for tensor in optimizer.state[parameter].values())


BAD = [
    ({"lr": -1.0}, "lr=-1.0, expected a number, 0 or more"),
    ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\), expected two numbers in"),
    ({"betas": (0.9,)}, r"betas=\(0.9,\), expected two numbers in"),
    ({"betas": 0.9}, r"betas=0.9, expected two numbers in"),
    (
        {"betas": (0.9, 0.999999), "bias_correction": "coordinate"},
        "with bias_correction='coordinate', expected at most 0.99999",
    ),
    ({"eps": -1.0}, "eps=-1.0"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0"),
    ({"moments": "own"}, "moments='own', expected 'shared' or 'private'"),
    ({"workers": 0}, "workers=0, expected"),
    ({"bias_correction": "none"}, "bias_correction='none', expected 'step' or 'coordinate'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=lambda case: str(case)[:20])
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncAdam([weight()], **settings)


def test_tensors_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="run the lazy module once"):
        AsyncAdam(nn.LazyLinear(1).parameters())
    with pytest.raises(ValueError, match="is on meta; workers share the memory of the CPU"):
        AsyncAdam([nn.Parameter(torch.empty(3, device="meta"))])
    with pytest.raises(ValueError, match="complex64"):
        AsyncAdam([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_parameter_on_the_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="is on cuda:0; workers share the memory of the CPU"):
        AsyncAdam([nn.Parameter(torch.zeros(3, device="cuda"))])


def test_a_parameter_that_left_shared_memory_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = AsyncAdam(model.parameters())
    model.double()
    model(torch.ones(2, dtype=torch.float64)).backward()
    with pytest.raises(ValueError, match="not where the optimizer put it"):
        optimizer.step()


@pytest.mark.fault("step() is called outside a worker", "ValueError")
def test_stepping_outside_a_worker_is_refused() -> None:
    optimizer = AsyncAdam([weight()], workers=2)
    with pytest.raises(ValueError, match=r"step\(\) outside a worker, with workers=2"):
        optimizer.step()
    with pytest.raises(ValueError, match="worker 2 of 2"):
        optimizer.as_worker(2)


@pytest.mark.fault("a state of another number of workers is loaded", "ValueError; names the tensor")
def test_a_state_of_other_workers_or_moments_is_refused() -> None:
    saved = AsyncAdam([weight()], workers=2).state_dict()
    with pytest.raises(ValueError, match="step of parameter 0 is"):
        AsyncAdam([weight()], workers=3).load_state_dict(saved)
    with pytest.raises(ValueError, match="exp_avg of parameter 0 is"):
        AsyncAdam([weight()], workers=2, moments="private").load_state_dict(saved)
    counting = AsyncAdam([weight()], workers=2, bias_correction="coordinate")
    with pytest.raises(ValueError, match="updates of parameter 0 is None in the saved state"):
        counting.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"updates of parameter 0 is .* and None here"):
        AsyncAdam([weight()], workers=2).load_state_dict(counting.state_dict())
