"""Logistic regression by asynchronous Adam: the reference, scikit-learn's rules, threads."""

import pickle
import time
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from offbeat.hogwild import AsyncAdamClassifier
from offbeat.hogwild.logistic import descent
from offbeat.hogwild.logistic.descent import Descent
from reference.async_adam import async_adam

Array = NDArray[Any]


def problem(classes: int = 2, n: int = 400, d: int = 60, density: float = 0.1) -> tuple[Any, Array]:
    """Sparse rows, labelled at random by a dense hyperplane for each class."""
    random = np.random.default_rng(0)
    x = sp.random(n, d, density, format="csr", random_state=random, data_rvs=random.standard_normal)
    logits = x @ random.normal(size=(d, classes)) + random.gumbel(size=(n, classes))
    return x, logits.argmax(axis=1)


def objective(model: Any, x: Any, y: Array, l2: float) -> float:
    likely = model.predict_proba(x)[np.arange(len(y)), y]
    weights = model.coef_ if len(model.classes_) > 2 else model.coef_[0]
    return float(-np.log(likely).mean() + l2 / 2 * np.square(weights).sum())


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start all threads, however little there is to do."""
    monkeypatch.setattr(descent, "THREAD_VALUES", 1)
    monkeypatch.setattr(descent, "TRIED_AFTER", 1)
    monkeypatch.setattr(Descent, "_try", lambda self, *_: self.workers)


@parametrize_with_checks([AsyncAdamClassifier()])
def test_it_is_a_scikit_learn_estimator(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize(
    ("moments", "classes", "correction"),
    [
        ("shared", 2, "coordinate"),
        ("shared", 3, "step"),
        ("private", 2, "step"),
        ("private", 3, "coordinate"),
    ],
)
def test_full_batches_follow_the_reference(moments: str, classes: int, correction: str) -> None:
    """A batch of all rows has no order: every gradient can be computed apart."""
    x, y = problem(classes)
    l2, columns = 0.01, 1 if classes == 2 else classes
    target = (y[:, None] == 1) if classes == 2 else y[:, None] == np.arange(classes)
    theta = np.zeros((x.shape[1] + 1, columns))
    full = sp.hstack([x, np.ones((len(y), 1))]).tocsr()
    steps: list[tuple[int, int, Array]] = []
    for t in range(1, 16):
        z = full @ theta
        z = z - z.max(1, keepdims=True) if classes > 2 else z
        likely = (
            np.exp(z) / np.exp(z).sum(1, keepdims=True) if classes > 2 else 1 / (1 + np.exp(-z))
        )
        g = full.T @ (likely - target) / len(y)
        g[:-1] += l2 * theta[:-1] * (g[:-1] != 0)  # every feature is in every batch
        steps.append((0, t, g.flatten()))
        flat, *_ = async_adam(
            np.zeros(theta.size), steps, workers=1, private=False, alpha=0.05,
            by_coordinate=correction == "coordinate",
        )  # fmt: skip
        theta = flat.reshape(theta.shape)
    model = AsyncAdamClassifier(
        moments, batch_size=len(y), l2=l2, learning_rate=0.05, max_iter=15, tol=None,
        bias_correction=correction,
    ).fit(x, y)  # fmt: skip
    np.testing.assert_allclose(model.coef_.T, theta[:-1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(model.intercept_, theta[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("threads", "moments", "classes"), [(1, "private", 3), (4, "shared", 3), (4, "private", 2)]
)
@pytest.mark.usefixtures("_eager")
def test_the_optimum_is_that_of_the_regularized_problem(
    threads: int, moments: str, classes: int
) -> None:
    """The sparse l2 term has the gradient of the dense one, in expectation."""
    x, y = problem(classes)
    best = LogisticRegression(C=1 / (0.02 * len(y)), tol=1e-8).fit(x, y)
    model = AsyncAdamClassifier(moments, n_jobs=threads, l2=0.02, tol=None, random_state=0)
    for rate, passes in ((0.01, 150), (0.001, 100)):
        model.set_params(learning_rate=rate)
        for _ in range(passes):
            model.partial_fit(x, y, classes=np.arange(classes))
    # Within 1 %: noise of small batches at a small, constant step size.
    assert objective(model, x, y, 0.02) < 1.01 * objective(best, x, y, 0.02)
    assert model.n_updates_ == 250 * 25


def test_stored_zeros_and_entries_in_two_parts_change_nothing() -> None:
    """The l2 term of a feature is divided by how likely a batch is to have it."""
    x, y = problem(density=0.02)
    rows, columns = np.indices(x.shape, np.int32).reshape(2, -1)
    with_zeros = sp.csr_array((x.toarray().ravel(), (rows, columns)), x.shape)
    halves = sp.csr_array((x.data.repeat(2) / 2, x.indices.repeat(2), x.indptr * 2), x.shape)
    assert with_zeros.nnz == x.shape[0] * x.shape[1]
    assert halves.nnz == 2 * x.nnz

    def coefficients(given: Any) -> Array:
        model = AsyncAdamClassifier(l2=0.02, max_iter=5, tol=None, random_state=0)
        return np.array(model.fit(given, y).coef_)

    expected = coefficients(x)
    for given in (with_zeros, halves):
        before = given.nnz
        np.testing.assert_allclose(coefficients(given), expected, rtol=1e-12)
        assert given.nnz == before, "it is the caller's"


@pytest.mark.parametrize(("moments", "correction"), [("shared", "coordinate"), ("private", "step")])
@pytest.mark.usefixtures("_eager")
def test_four_threads_reach_the_loss_of_one(moments: str, correction: str) -> None:
    x, y = problem(n=2000, d=300, density=0.03)
    settings = {"l2": 0.002, "max_iter": 60, "tol": None, "random_state": 0}
    settings["bias_correction"] = correction
    serial = AsyncAdamClassifier(**settings).fit(x, y)
    threads = AsyncAdamClassifier(moments, n_jobs=4, **settings).fit(x, y)
    assert np.isfinite(threads.coef_).all()
    assert threads.n_updates_ == serial.n_updates_ == 60 * 125
    assert objective(threads, x, y, 0.002) < 1.05 * objective(serial, x, y, 0.002)


@pytest.mark.parametrize("moments", ["shared", "private"])
def test_few_rows_start_no_thread(moments: str) -> None:
    """Starting one would take longer than it saves; the result is then that of one thread."""
    x, y = problem()
    one, many = (
        AsyncAdamClassifier(moments, n_jobs=jobs, random_state=0).partial_fit(x, y, classes=[0, 1])
        for jobs in (1, 8)
    )
    assert np.array_equal(one.coef_, many.coef_)


@pytest.mark.parametrize("slower", [1, 4])
def test_the_faster_of_one_thread_and_all_continues(
    slower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial leaves no trace in the model; fit() and a stream of calls hold one each."""
    x, y = problem()
    ran, run = list[int](), Descent._run

    def slowed(self: Descent, *call: Any) -> Any:
        ran.append(call[1].workers)
        time.sleep(2e-5 * call[3] * (ran[-1] == slower))  # by the number of updates
        return run(self, *call)

    monkeypatch.setattr(Descent, "_run", slowed)
    monkeypatch.setattr(descent, "THREAD_VALUES", 1)
    monkeypatch.setattr(descent, "TRIED_AFTER", 3 * x.nnz)
    faster = 5 - slower
    AsyncAdamClassifier(n_jobs=4, max_iter=3, tol=None).fit(x, y)
    assert ran == [1, 1, 4, 4] * 3 + [faster]
    ran.clear()
    stream, serial = (AsyncAdamClassifier(n_jobs=jobs, random_state=0) for jobs in (4, 1))
    for _ in range(5):
        stream.partial_fit(x, y, classes=[0, 1])
        serial.partial_fit(x, y, classes=[0, 1])
    assert [workers for workers in ran if workers != 1].count(4) == 6 + 3 * (faster == 4)
    assert stream.n_updates_ == serial.n_updates_ == 5 * 25
    if faster == 1:
        assert np.array_equal(stream.coef_, serial.coef_)


def test_time_goes_on_whatever_the_number_of_threads_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """t of a shared update is the number of updates of all threads, to within one of each."""
    x, y = problem()
    model, threads = AsyncAdamClassifier(n_jobs=4, random_state=0), iter((4, 1, 2))
    monkeypatch.setattr(Descent, "threads", lambda *_: next(threads))
    for _ in range(3):
        model.partial_fit(x, y, classes=[0, 1])
    assert model.n_updates_ == 3 * 25
    assert model.descent_.counts[:2, 1].sum() == pytest.approx(3 * 25, abs=2)


def test_a_feature_met_late_moves_by_the_learning_rate() -> None:
    """By the time of the training, its first step would be 3.2 times as long."""
    early, late = sp.csr_array([[1.0, 0.0]] * 2), sp.csr_array([[0.0, 1.0]] * 2)
    moved = {}
    for correction in ("step", "coordinate"):
        model = AsyncAdamClassifier(
            batch_size=1, l2=0.0, fit_intercept=False, random_state=0, bias_correction=correction
        )
        for _ in range(2000):
            model.partial_fit(early, [0, 1], classes=[0, 1])
        model.set_params(batch_size=2).partial_fit(late, [1, 1])
        moved[correction] = model.coef_[0, 1] / model.learning_rate
    assert moved == pytest.approx({"step": 3.16, "coordinate": 1.0}, rel=0.02)


def test_threads_pad_few_sparse_features_and_pack_dense_ones() -> None:
    """Rows of theta, the l2 factor, m and v: 16 bytes, or a cache line of 64."""
    for density, width in ((0.01, 16), (1.0, 4)):
        settings = {"private": False, "by_coordinate": False, "density": density}
        kind, random = np.dtype(np.float32), np.random.RandomState(0)
        memory = Descent(100, 1, kind, 2, random=random, **settings)
        memory.shared[:] = expected = random.rand(101, 4)
        memory.pad()
        assert memory.shared.strides == (4 * width, 4)
        np.testing.assert_array_equal(memory.shared[:, :4], expected.astype(kind))
        assert memory.shared.ctypes.data % (4 * width) == 0


def test_a_feature_that_no_row_has_stays_zero() -> None:
    x, y = problem()
    x = x.tolil()
    x[:, 7] = 0.0
    model = AsyncAdamClassifier(max_iter=5).fit(x.tocsr(), y)
    assert model.coef_[0, 7] == 0.0
    assert (np.delete(model.coef_[0], 7) != 0.0).all()


def test_dense_and_sparse_input_give_the_same_model() -> None:
    x, y = problem()
    models = [AsyncAdamClassifier(random_state=0, max_iter=5).fit(z, y) for z in (x, x.toarray())]
    assert np.array_equal(models[0].coef_, models[1].coef_)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_dtype_stays(kind: type) -> None:
    x, y = problem()
    model = AsyncAdamClassifier(max_iter=2, random_state=0).fit(x.astype(kind), y)
    assert model.coef_.dtype == model.decision_function(x.astype(kind)).dtype == kind


def test_fit_stops_when_the_loss_stays_and_keeps_its_history() -> None:
    x, y = problem(n=100)
    model = AsyncAdamClassifier(max_iter=5000, tol=1e-3, random_state=0).fit(x, y)
    assert model.n_iter_ == len(model.loss_curve_) < 5000
    assert model.loss_curve_[0] > model.loss_curve_[-1]
    assert model.loss_curve_[0] == pytest.approx(np.log(2), rel=0.1)


def test_one_seed_one_model_and_pickles_go_on() -> None:
    x, y = problem()
    whole, parts = (AsyncAdamClassifier(random_state=3, moments="private") for _ in range(2))
    for _ in range(4):
        whole.partial_fit(x, y, classes=[0, 1])
        parts = pickle.loads(pickle.dumps(parts.partial_fit(x, y, classes=[0, 1])))
    assert np.array_equal(whole.coef_, parts.coef_)


def test_progress_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    AsyncAdamClassifier(max_iter=2, verbose=True).fit(*problem())
    assert capsys.readouterr().out.startswith("pass 2  loss 0.")


BAD = {
    "moments": "own", "batch_size": 0, "l2": -1.0, "learning_rate": 0.0, "beta_1": 1.0,
    "beta_2": -0.1, "epsilon": -1.0, "max_iter": 0, "n_iter_no_change": 0,
    "bias_correction": "none",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value!r}, expected"):
        AsyncAdamClassifier().set_params(**{name: value}).fit(*problem())


def test_labels_that_were_not_announced_are_refused() -> None:
    x, y = problem(3)
    with pytest.raises(ValueError, match="has no classes"):
        AsyncAdamClassifier().partial_fit(x, y)
    with pytest.raises(ValueError, match=r"y holds \[2\], which are not among the classes"):
        AsyncAdamClassifier().partial_fit(x, y, classes=[0, 1])


def test_a_loss_that_overflows_is_an_error_with_the_fix() -> None:
    x, y = problem()
    with pytest.raises(ValueError, match="scale the features"):
        AsyncAdamClassifier(learning_rate=1e300, max_iter=20).fit(x, y)


def test_any_row_may_be_dealt_first() -> None:
    """The random numbers that deal must not begin alike whatever their seed is."""
    first = set()
    for seed in range(64):
        random = np.random.RandomState(seed)
        memory = Descent(
            1, 1, np.dtype(np.float32), 2, private=False, by_coordinate=False, density=1.0,
            random=random,
        )  # fmt: skip
        rows = memory._deal(8, 4, 2)
        assert sorted(rows.ravel()) == list(range(8))
        first.add(int(rows[0, 0]))
    assert first == set(range(8))
