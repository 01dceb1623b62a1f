"""Logistic regression by asynchronous Adam, as a scikit-learn estimator."""

from typing import Annotated, Any, Literal, final

import numpy as np
import scipy.sparse as sp
from joblib import effective_n_jobs
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from offbeat.hogwild.logistic.descent import Descent
from offbeat.kernels.logistic_memory import Data, Settings
from offbeat.settings import above, at_least, between, check_values

Array = NDArray[Any]
# Used as they are: scikit-learn checks n_jobs and random_state, and flags may be numbers.
_UNCHECKED = {"n_jobs", "tol", "fit_intercept", "random_state", "verbose"}


@final
class AsyncAdamClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    r"""Trains binary or multinomial logistic regression by threads without locks.

    .. math::
        F(\theta) &= \frac{1}{n} \sum_i \ell(y_i, \theta^T x_i) + \frac{\lambda}{2} |\theta|^2 \\
        g_j &= \frac{1}{B} \sum_{i \in batch} \partial_j \ell_i + \frac{\lambda}{p_j}\, \theta_j
        \quad \text{where the first term is not } 0 \\
        p_j &= 1 - \prod_{b=0}^{B-1} \frac{n - n_j - b}{n - b}

    Each thread draws batches of B rows and applies Adam to the coordinates that they touch: m, v
    and theta move where the loss has a gradient, and nowhere else (see :class:`AsyncAdam`).
    ``l2`` lambda acts there too. p_j is the probability that a batch holds one of the
    :math:`n_j` rows with feature j, so that the expected gradient is that of F although the
    update stays sparse; in dense data it is the usual term. The intercept is not regularized.

    Rows are divided into T random parts, again whenever the loss is evaluated. A thread shuffles a
    part, processes it and takes the next, so that a pass, about n / B updates of all threads
    together, uses every row once. With one thread results depend on ``random_state`` alone; with
    several threads also on timing.

    Input is CSR or dense; float32 stays float32, which is the fastest, all else is float64. Extra
    memory: three values for each feature and class ("shared"), or 1 + 2 T ("private"), with
    ``bias_correction="coordinate"`` four, or 1 + 3 T; small sparse problems with several threads
    round this up to 64 bytes per feature.

    Where T threads are slower than one, one is used: short runs of both are timed on a copy of the
    memory, after 134 million non-zero values (0.6 s) or where :meth:`fit` has more.

    Args:
        moments: "shared" (Algorithm 1) or "private" (Algorithm 2).
        n_jobs: threads T; None is one, -1 all cores.
        batch_size: B, at most the number of rows.
        l2: lambda.
        learning_rate: the step size alpha.
        beta_1: decay rate of m.
        beta_2: decay rate of v.
        epsilon: added to the root of v.
        max_iter: passes over the data at most.
        tol: stop when the loss of ``n_iter_no_change`` passes in a row was above best - tol; None
            never stops. Checked after every 131,072 rows, or after each pass if that is more; with
            several threads after 67 million non-zero values.
        n_iter_no_change: see ``tol``.
        fit_intercept: whether there is an intercept.
        random_state: seed or generator for the order of rows.
        verbose: print the loss whenever it is evaluated.
        bias_correction: "step", by the time t of the whole training as in the paper, or
            "coordinate", by the number of updates of each coordinate (see :class:`AsyncAdam`).

    Attributes after ``fit``: ``classes_``, ``coef_`` (1 or classes, features), ``intercept_``,
    ``n_features_in_``, ``n_iter_`` (passes done), ``n_updates_``, and ``loss_curve_``, the mean
    log-loss of each pass: of every batch just before its update, without the l2 term. Threads do
    not wait for each other between passes, so that their passes of one number may differ in time.

    Raises:
        ValueError: for unusable data, for settings out of range, and when the loss is no longer
            finite.

    Source: Renda, Asynchronous Adam, section 4.2, which does not state that the l2 term is sparse.

    >>> import numpy as np
    >>> x, y = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array(["no", "no", "yes", "yes"])
    >>> model = AsyncAdamClassifier(random_state=0).fit(x, y)
    >>> model.predict([[-3.0], [3.0]])
    array(['no', 'yes'], dtype='<U3')
    """

    def __init__(
        self,
        moments: Literal["shared", "private"] = "shared",
        *,
        n_jobs: int | None = None,
        batch_size: Annotated[int, at_least(1, "rows")] = 16,
        l2: Annotated[float, at_least(0)] = 1e-4,
        learning_rate: Annotated[float, above(0)] = 0.01,
        beta_1: Annotated[float, between(0, 1, closed="left")] = 0.9,
        beta_2: Annotated[float, between(0, 1, closed="left")] = 0.999,
        epsilon: Annotated[float, at_least(0)] = 1e-8,
        max_iter: Annotated[int, at_least(1, "passes")] = 200,
        tol: float | None = 1e-4,
        n_iter_no_change: Annotated[int, at_least(1, "passes")] = 5,
        fit_intercept: bool = True,
        random_state: Any = None,
        verbose: bool = False,
        bias_correction: Literal["step", "coordinate"] = "step",
    ) -> None:
        self.moments = moments
        self.n_jobs = n_jobs
        self.batch_size = batch_size
        self.l2 = l2
        self.learning_rate = learning_rate
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.fit_intercept = fit_intercept
        self.random_state = random_state
        self.verbose = verbose
        self.bias_correction = bias_correction

    def fit(self, X: Any, y: Any) -> "AsyncAdamClassifier":
        """Train from zero until the loss stays, for ``max_iter`` passes at most."""
        X, y = self._validate(X, y, first=True)
        self._begin(X, np.unique(y))
        data, decay, settings = self._problem(X, y)
        workers = self.descent_.threads(data, decay, settings, self.max_iter)
        settings = settings._replace(workers=workers)
        chunk = self.descent_.round(data, workers)
        while self.n_iter_ < self.max_iter and not self._settled():
            self._go(data, decay, settings, min(chunk, self.max_iter - self.n_iter_))
        self._publish()
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "AsyncAdamClassifier":
        """Make one pass over these rows; the first call needs all ``classes``.

        p_j of the l2 term is that of these rows.
        """
        first = not hasattr(self, "descent_")
        X, y = self._validate(X, y, first=first)
        if first and classes is None:
            raise ValueError("the first partial_fit() has no classes; pass all that will occur")
        if first:
            self._begin(X, np.unique(classes))
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"`classes={classes!r}` is not the same as on last call to partial_fit, was: "
                f"{self.classes_!r}"
            )
        kinds = self.moments == "private", self.bias_correction == "coordinate"
        if kinds != (self.descent_.private, self.descent_.by_coordinate):
            raise ValueError(
                f"moments={self.moments!r}, bias_correction={self.bias_correction!r} differ from "
                "those of the first partial_fit(); begin anew with fit() or a clone"
            )
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y holds {unknown[:3]}, which are not among the classes; name them "
                             "in the first partial_fit(classes=...)")  # fmt: skip
        data, decay, settings = self._problem(X, y)
        workers = self.descent_.threads(data, decay, settings, 1)
        self._go(data, decay, settings._replace(workers=workers), 1)
        self._publish()
        return self

    def decision_function(self, X: Any) -> Array:
        """Return logits: (n,) of the second of two classes, or (n, classes)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", reset=False)
        logits = np.asarray(X @ self.coef_.T + self.intercept_)
        return logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> Array:
        """Return the probabilities (n, classes)."""
        z = self.decision_function(X)
        if z.ndim == 1:
            z = np.stack([-z / 2, z / 2], axis=1)
        z = np.exp(z - z.max(axis=1, keepdims=True))
        likely: Array = z / z.sum(axis=1, keepdims=True)
        return likely

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        z = self.decision_function(X)
        best: Array = self.classes_[(z > 0).astype(int) if z.ndim == 1 else z.argmax(axis=1)]
        return best

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _validate(self, X: Any, y: Any, *, first: bool) -> tuple[Any, Array]:
        self._check_settings()
        kinds = [np.float64, np.float32] if first else [self.descent_.dtype]
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=kinds, accept_large_sparse=False, reset=first
        )
        check_classification_targets(y)
        return _without_zeros(sp.csr_array(X)), y

    def _check_settings(self) -> None:
        # In fit, not in the constructor: scikit-learn's clone and set_params assign unchecked.
        values = {n: v for n, v in self.get_params().items() if n not in _UNCHECKED}
        if values["n_iter_no_change"] == np.inf:  # never stop early
            del values["n_iter_no_change"]
        plain = {n: v.item() if isinstance(v, np.generic) else v for n, v in values.items()}
        check_values(AsyncAdamClassifier.__init__, plain)

    def _begin(self, X: Any, classes: Array) -> None:
        if len(classes) < 2:
            raise ValueError(f"y holds one class, {classes}; a classifier needs two or more")
        self.classes_ = classes
        self.descent_ = Descent(
            features=X.shape[1],
            columns=1 if len(classes) == 2 else len(classes),
            dtype=X.dtype,
            workers=effective_n_jobs(self.n_jobs),
            private=self.moments == "private",
            by_coordinate=self.bias_correction == "coordinate",
            density=X.nnz / (X.shape[0] * X.shape[1]),
            random=check_random_state(self.random_state),
        )
        self.loss_curve_: list[float] = []
        self.n_iter_ = 0

    def _problem(self, X: Any, y: Array) -> tuple[Data, Array, Settings]:
        """Return rows, the l2 factor of each feature, and classes as numbers, for the kernels."""
        kind, n = X.dtype, X.shape[0]
        batch = min(self.batch_size, n)
        target = np.searchsorted(self.classes_, y)
        target = target.astype(kind if len(self.classes_) == 2 else np.uint32)
        data = Data(X.indptr, X.indices.view(np.uint32), X.data, target)
        absent = n - np.bincount(X.indices, minlength=X.shape[1])
        never = np.ones(X.shape[1])
        for b in range(batch):
            never *= np.maximum(absent - b, 0) / (n - b)
        decay = self.l2 / np.where(never < 1, 1 - never, 1)
        b1, b2 = self.beta_1, self.beta_2
        betas = tuple(np.array([b1, 1 - b1, b2, 1 - b2, self.epsilon], kind))
        to = self.descent_
        settings = Settings(
            self.learning_rate, b1, b2, betas, batch, to.columns, to.workers, to.private,
            self.fit_intercept,
        )  # fmt: skip
        return data, np.append(decay, 0.0), settings

    def _go(self, data: Data, decay: Array, settings: Settings, passes: int) -> None:
        losses = self.descent_.passes(data, decay, settings, passes)
        self.n_iter_ += passes
        self.loss_curve_ += losses.tolist()
        if self.verbose:
            print(f"pass {self.n_iter_}  loss {losses[-1]:.6f}", flush=True)
        if not np.isfinite(losses).all():
            raise ValueError(
                f"the loss is {losses[-1]} after {self.n_iter_} passes; scale the features "
                "(StandardScaler, MaxAbsScaler) or lower learning_rate"
            )

    def _settled(self) -> bool:
        """Return whether the loss has not improved in ``n_iter_no_change`` passes."""
        if self.tol is None:
            return False
        best, waited = np.inf, 0
        for loss in self.loss_curve_:
            waited = waited + 1 if loss > best - self.tol else 0
            best = min(best, loss)
            if waited >= self.n_iter_no_change:
                return True
        return False

    def _publish(self) -> None:
        theta = self.descent_.theta
        self.coef_ = np.ascontiguousarray(theta[:-1].T)
        self.intercept_ = theta[-1].copy()
        self.n_updates_ = self.descent_.updates


def _without_zeros(X: Any) -> Any:
    """Return a matrix whose entries are the nonzeros, each once: the others would count as rows."""
    if X.has_canonical_format and X.data.all():
        return X
    X = X.copy()  # its arrays may be the caller's
    X.sum_duplicates()
    X.eliminate_zeros()
    return X
