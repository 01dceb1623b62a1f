"""The memory of asynchronous logistic regression, and the threads that update it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.kernels import logistic
from offbeat.kernels.bias_correction import corrections
from offbeat.kernels.logistic_memory import Data, Memory, Settings, Thread

Array = NDArray[Any]
LINE = 64  # bytes that cores hand to each other at a time
# Rows between looks at the loss; non-zero values where threads run, for which each look is a join.
ROUND_ROWS, ROUND_VALUES = 2**17, 2**26
# Up to this many bytes, a feature of sparse rows has cache lines to itself. Then two threads wait
# for each other only where they update one feature; beyond, they rarely collide, and memory is
# saved. Dense rows update all features of a line together: packed, there are fewer lines to move.
PADDED_BYTES = 2**22
SPARSE = 0.1  # largest share of non-zero values in rows that are called sparse here
# Non-zero values for each thread of a call, at least: 5 ms, long against starting it.
THREAD_VALUES = 2**20
# Non-zero values until threads are tried, 0.6 s, and of two runs of the trial. Whether threads
# are faster than one depends on how long a core takes to hand a line to another one, about as long
# as two values, and on how many lines they share.
TRIED_AFTER, TRIAL = 2**27, (2**17, 2**19)


@dataclass
class Descent:
    """theta, moments and counters of ``workers`` threads, which ``partial_fit`` continues with.

    One row per feature and the last for the intercept: theta of all classes, the l2 factor, m and
    v, side by side, so that an update touches one place in memory. With private moments theta and
    the factor are in ``shared`` and m and v in one block for each thread.
    """

    features: int
    columns: int  # 1 for two classes, else the number of classes
    dtype: np.dtype[Any]
    workers: int
    private: bool
    by_coordinate: bool  # whether the bias is corrected by coordinate
    density: float  # share of non-zero values in the rows
    random: np.random.RandomState
    updates: int = field(default=0, init=False)  # of all threads so far
    values: int = field(default=0, init=False)  # non-zero ones processed so far
    fastest: int | None = field(default=None, init=False)  # number of threads, after the trial
    counts: Array = field(init=False)
    shared: Array = field(init=False)
    own: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        """Allocate all of it, zeroed."""
        self.counts = np.zeros((self.workers, LINE // 8), np.int64)
        own = (3 if self.by_coordinate else 2) * self.columns
        width = self.columns + 1 + (0 if self.private else own)
        rows = self.features + 1
        self.shared = np.zeros((rows, width), self.dtype)
        count = self.workers if self.private else 0
        self.own = [np.zeros((rows, own), self.dtype) for _ in range(count)]

    @property
    def theta(self) -> Array:
        """Coefficients by feature and class, the intercept last; a view."""
        return self.shared[:, : self.columns]

    def threads(self, x: Data, decay: Array, settings: Settings, count: int) -> int:
        """Return how many threads make ``count`` passes the soonest: all, or one."""
        values = len(x.data) * count
        if values < self.workers * THREAD_VALUES or self.values + values < TRIED_AFTER:
            return 1
        if self.fastest is None:
            self.fastest = self._try(x, decay, settings) if self.workers > 1 else 1
            if self.fastest > 1:
                self.pad()
        return self.fastest

    def round(self, x: Data, workers: int) -> int:
        """Return the number of passes between two looks at the loss."""
        joins = ROUND_VALUES // max(1, len(x.data)) if workers > 1 else 1
        return max(1, ROUND_ROWS // (len(x.indptr) - 1), joins)

    def pad(self) -> None:
        """Let each feature begin on a cache line, if rows are sparse and features few."""
        (rows, width), line = self.shared.shape, LINE // self.dtype.itemsize
        full = -(-width // line) * line
        if self.density > SPARSE or rows * full * self.dtype.itemsize > PADDED_BYTES:
            return
        memory = np.zeros(rows * full + line, self.dtype)
        start = -memory.ctypes.data % LINE // self.dtype.itemsize
        padded = memory[start:][: rows * full].reshape(rows, full)
        padded[:, :width] = self.shared
        self.shared = padded

    def passes(self, x: Data, decay: Array, settings: Settings, count: int) -> Array:
        """Make ``count`` passes over the rows; return the mean loss of each.

        The rows are divided into parts (hands), again in every call. Each thread shuffles a hand
        and processes it, a different one in every pass, and waits for the others only at the end.
        ``settings.workers`` threads do so, all or fewer.
        """
        self.shared[:, self.columns] = decay
        rows = len(x.indptr) - 1
        updates = -(-rows // settings.batch)
        hands = self._deal(rows, settings.batch, settings.workers)
        losses = self._run(x, settings, hands, updates, count)
        self.updates += updates * count
        self.values += len(x.data) * count
        return losses / (updates * settings.batch)

    def _try(self, x: Data, decay: Array, settings: Settings) -> int:
        """Return which is faster, one thread or all, by short runs in turns on copies."""
        copies = {1: deepcopy(self), self.workers: deepcopy(self)}
        copies[self.workers].pad()
        rows, batch = len(x.indptr) - 1, settings.batch
        hands = copies[1]._deal(rows, batch, self.workers)
        short, long = (1 + values * rows // (len(x.data) * batch) for values in TRIAL)
        seconds = {(workers, updates): inf for workers in copies for updates in (short, long)}
        for turn in range(3):
            for workers, updates in seconds:
                copies[workers].shared[:, self.columns] = decay
                start = perf_counter()
                run = settings._replace(workers=workers)
                copies[workers]._run(x, run, hands, updates, 1)
                if turn:  # the first one fills the caches
                    taken = min(seconds[workers, updates], perf_counter() - start)
                    seconds[workers, updates] = taken
        # Without what every run costs: starting threads, and empty memory for the gradient.
        return min(copies, key=lambda workers: seconds[workers, long] - seconds[workers, short])

    def _run(self, x: Data, settings: Settings, hands: Array, updates: int, count: int) -> Array:
        """Make ``count`` times ``updates``, divided among the threads; return the summed losses."""
        workers = settings.workers
        shares = [(updates + i) // workers for i in range(workers)]
        losses = np.zeros((workers, -(-count // (LINE // 8)) * (LINE // 8)))
        kernel: Callable[..., None] = logistic.binary if self.columns == 1 else logistic.multinomial
        self.counts[:, 0] = len(x.indptr)  # every thread begins a pass of its own,
        self.counts[:, 2] = np.arange(self.workers)  # with a hand that no other one has
        if not self.private:  # t = t_i T + ... goes on from the updates of all, whatever T was
            self.counts[:, 1] = -(-self.updates // workers)
        threads = [self._thread(own, hands.copy()) for own in self.counts[:workers]]
        betas = settings.b1, settings.b2
        factors = corrections(betas, self.dtype) if self.by_coordinate else None
        jobs = [
            (x, self._memory(i), threads[i], settings, factors, share, losses[i, :count])
            for i, share in enumerate(shares)
        ]
        # One of the threads is this one: in the time that starting another takes, it does dozens
        # of updates.
        with ThreadPoolExecutor(workers) as pool:
            others = [pool.submit(kernel, *job) for job in jobs[1:]]
            kernel(*jobs[0])
            for other in others:
                other.result()
        total: Array = losses[:, :count].sum(0)
        return total

    def _memory(self, worker: int) -> Memory:
        shared = self.shared.reshape(-1)
        width = np.uint64(self.shared.shape[1])
        if self.private:
            own = self.own[worker]
            return Memory(shared, own.reshape(-1), width, np.uint64(own.shape[1]))
        return Memory(shared, shared[self.columns + 1 :], width, width)

    def _deal(self, rows: int, batch: int, workers: int) -> Array:
        """The rows, shuffled, by hand: one for each thread, or one for all where rows are few.

        Threads that each drew from all rows would use some twice in a pass and others not at all:
        measured, four times the passes to within 1 % of the optimum.
        """
        hands = workers if rows >= workers * batch else 1
        dealt = np.arange(rows, dtype=np.uint32)
        dealer = self._thread(np.array([rows, 0, 0]), dealt[np.newaxis])
        logistic.draw_batch(dealer, np.empty_like(dealt))  # a batch of all rows: shuffled in place
        return dealt[: rows // hands * hands].reshape(hands, -1)

    def _thread(self, counts: Array, hands: Array) -> Thread:
        state = np.zeros(LINE // 8, np.uint64)
        # All bits: the first numbers from a small seed are small. Zero would stay zero.
        state[0] = self.random.randint(1, 2**63, dtype=np.uint64)
        return Thread(hands, counts, state)
