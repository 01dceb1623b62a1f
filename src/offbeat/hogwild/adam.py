"""Adam for workers that share memory: a torch optimizer for dense and sparse gradients."""

import os
import random
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Annotated, Any, Literal, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from offbeat.functional import adam_step_size
from offbeat.hogwild import worker
from offbeat.hogwild.target import Target
from offbeat.kernels.bias_correction import require_table
from offbeat.settings import at_least, check_values

LINE = 8  # int64 in a cache line: the counters of two workers never share one
Moments = Literal["shared", "private"]
BiasCorrection = Literal["step", "coordinate"]


@final
class AsyncAdam(Optimizer):
    r"""Implements Adam for workers that update one set of parameters without locks.

    .. math::
        \forall g_j \ne 0:\quad
        m_j &\leftarrow \beta_1 m_j + (1 - \beta_1) g_j, \quad
        v_j \leftarrow \beta_2 v_j + (1 - \beta_2) g_j^2 \\
        \theta_j &\leftarrow (1 - \alpha_0 \lambda)\,\theta_j
            - \alpha_t\, m_j / (\sqrt{v_j} + \epsilon), \quad
        \alpha_t = \alpha_0 \sqrt{1 - \beta_2^t} / (1 - \beta_1^t)

    With ``moments="shared"`` (Algorithm 1) all T workers update one m and one v, and worker i
    takes :math:`t = t_i T + 1 + \mathrm{uniform}\{0..T-1\}`, then :math:`t_i \leftarrow t_i + 1`.
    With ``moments="private"`` (Algorithm 2) each has its own m, v and t. Coordinates with g = 0
    keep parameter and moments bit for bit; weight decay is decoupled and acts on touched
    coordinates only, so that sparse stays sparse. ``t`` is counted for each parameter, by each
    worker: steps in which it had a gradient.

    The moments of a coordinate that is met late begin at zero too, where alpha_t is alpha_0
    already: its first steps are up to 6.6 alpha_0. ``bias_correction="coordinate"`` takes the
    number of updates of each coordinate for t, and moves it by alpha_0.

    All state is allocated by the constructor, in shared memory, before any worker starts: build
    the optimizer in the parent process and pass it to :func:`launch`. Parameters are moved to
    shared memory in place. Gradients are dense, or sparse as those of embeddings, with duplicates.
    A gradient with an infinite or NaN element skips the whole step; ``skipped`` counts these. CPU
    only; float32 and float64 run in compiled kernels, other dtypes in torch.

    Extra memory: two models ("shared") or 2 T ("private"), and 64 bytes per worker and parameter;
    with ``bias_correction="coordinate"`` 4 bytes more for each coordinate, T times if "private".
    One read of the gradient to check it, one pass over the touched coordinates to apply it. No
    bytes are sent. ``docs/methods/hogwild.md`` describes the data races.

    Args:
        params: parameters or groups of them, as for every torch optimizer.
        lr: step size alpha_0.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the root of v, as in ``torch.optim.SparseAdam``.
        weight_decay: lambda, per step of a touched coordinate, times the learning rate.
        moments: "shared" or "private".
        workers: T, how many workers will step.
        bias_correction: "step", by t as in the paper, or "coordinate", by n_j.

    Raises:
        ValueError: for settings out of range, for parameters that cannot be shared, and in
            ``step`` where the state would silently not be shared: after a fork, outside
            ``launch`` with several workers, or when parameters were replaced.

    Source: Renda, Asynchronous Adam, section 3. There t can be 0 at the first step, which is 0/0;
    here it starts at 1.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> optimizer = AsyncAdam([weight], lr=0.1)
    >>> weight.grad = torch.tensor([0.0, 5.0, -0.2])
    >>> optimizer.step()
    >>> weight.data
    tensor([ 0.0000, -0.1000,  0.1000])
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: Annotated[float, at_least(0)] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: Annotated[float, at_least(0)] = 1e-8,
        weight_decay: Annotated[float, at_least(0)] = 0.0,
        *,
        moments: Moments = "shared",
        workers: Annotated[int, at_least(1)] = 1,
        bias_correction: BiasCorrection = "step",
    ) -> None:
        chosen = {"moments": moments, "workers": workers, "bias_correction": bias_correction}
        check_values(AsyncAdam.__init__, chosen)
        self.moments, self.workers, self.bias_correction = moments, workers, bias_correction
        self._counters = torch.zeros(workers, LINE, dtype=torch.int64).share_memory_()
        self._enter(None)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Move the group's parameters to shared memory and allocate their state; parent only."""
        if worker.number() is not None:
            raise ValueError(
                f"worker {worker.number()} builds or extends an AsyncAdam whose state the others "
                "would not see; build it in the parent and pass it in launch(args=...)"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_settings(group)
        if self.bias_correction == "coordinate":
            require_table(tuple(group["betas"]))
        for parameter in group["params"]:
            _check_parameter(parameter)
            parameter.share_memory_()
            self.state[parameter] = self._allocate(parameter)

    @property
    def steps(self) -> int:
        """The number of steps of all workers, without skipped ones, and with loaded ones."""
        return int(self._counts[:, 0].sum())

    @property
    def skipped(self) -> int:
        """The number of steps of all workers that were skipped for a non-finite gradient."""
        return int(self._counts[:, 1].sum())

    def as_worker(self, number: int) -> "AsyncAdam":
        """Return this optimizer as worker ``number``: settings of its own, shared state.

        For workers that alternate in one process; not needed with :func:`launch`. Gradients
        belong to the parameters, so such workers cannot run at the same time.
        """
        if not 0 <= number < self.workers:
            raise ValueError(f"worker {number} of {self.workers}; numbers start at 0")
        twin = AsyncAdam.__new__(AsyncAdam)
        twin.__setstate__(self.__getstate__())
        twin.param_groups = [dict(group) for group in self.param_groups]
        twin._enter(number)
        return twin

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of all parameters, or none if one of them is not finite."""
        number = self._number()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = [
            (self._target(p, number), p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        finite = all(target.is_finite(gradient) for target, gradient, _ in used)
        if finite:
            for target, gradient, group in used:
                self._update(target, gradient, group)
        self._counts[number, 0 if finite else 1] += 1
        worker.stepped()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state into the shared one, where all workers see it."""
        own = dict(self.state)
        saved = state_dict["state"]
        for index, state in enumerate(own.values()):
            there = saved.get(index, {})
            for name in sorted(state.keys() | there.keys()):
                found, expected = (getattr(s.get(name), "shape", None) for s in (there, state))
                if found != expected:
                    raise ValueError(
                        f"{name} of parameter {index} is {found} in the saved state and "
                        f"{expected} here; load with the moments, the number of workers and the "
                        "bias correction that saved it"
                    )
        super().load_state_dict(state_dict)
        for index, (parameter, state) in enumerate(own.items()):
            for name, tensor in state.items():  # not torch's copy: it casts counts to the dtype
                tensor.copy_(saved[index][name])
            self.state[parameter] = state
        made = [state["step"][:, 0] for state in own.values()]
        self._counts[:, 0] = torch.stack(made).amax(0).numpy()

    def __getstate__(self) -> dict[str, Any]:
        own = ("moments", "workers", "bias_correction", "_counters")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter(None)

    def _enter(self, number: int | None) -> None:
        """Initialize what belongs to this process alone."""
        self._own_number, self._process = number, os.getpid()
        self._random = random.Random(number)
        self._targets: dict[Tensor, Target] = {}
        self._counts = self._counters.numpy()  # writing through a tensor takes microseconds

    def _allocate(self, parameter: Tensor) -> dict[str, Tensor]:
        copies = (self.workers,) if self.moments == "private" else ()
        shape = (*copies, *parameter.shape)
        state = {"step": torch.zeros(self.workers, LINE, dtype=torch.int64)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(shape, dtype=parameter.dtype)
        if self.bias_correction == "coordinate":
            state["updates"] = torch.zeros(shape, dtype=torch.int32)
        return {name: tensor.share_memory_() for name, tensor in state.items()}

    def _number(self) -> int:
        if self._process != os.getpid():
            raise ValueError(
                "this process was forked after the optimizer was built; a forked copy of torch is "
                "not safe to train with: start workers with offbeat.hogwild.launch"
            )
        seat = worker.number() if self._own_number is None else self._own_number
        if seat is None and self.workers > 1:
            raise ValueError(
                f"step() outside a worker, with workers={self.workers}; run the training function "
                "with offbeat.hogwild.launch, or use optimizer.as_worker(number)"
            )
        seat = seat or 0
        if seat >= self.workers:
            raise ValueError(
                f"worker {seat} uses an AsyncAdam for {self.workers}; build it with the number "
                "that launch starts: AsyncAdam(..., workers=...)"
            )
        return seat

    def _target(self, parameter: Tensor, number: int) -> Target:
        """Return the memory of a parameter that this worker updates, if it is still shared."""
        target = self._targets.get(parameter)
        # Comparing the address is sufficient and faster: a target keeps its memory alive.
        stayed = target.pointer == parameter.data_ptr() if target else parameter.is_shared()
        if not stayed:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is not where the optimizer put it "
                "into shared memory: it was cast, moved or replaced; do that before AsyncAdam is "
                "built"
            )
        if target is None:
            state = self.state[parameter]
            own = [state.get(name) for name in ("exp_avg", "exp_avg_sq", "updates")]
            if self.moments == "private":
                own = [None if each is None else each[number] for each in own]
            m, v, counts = own
            target = Target(parameter.detach(), m, v, state["step"][number], counts)
            self._targets[parameter] = target
        return target

    def _update(self, target: Target, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, betas, t = float(group["lr"]), group["betas"], self._tick(target)
        target.update(
            gradient,
            alpha=lr if self.bias_correction == "coordinate" else adam_step_size(lr, betas, t),
            betas=betas,
            eps=group["eps"],
            decay=lr * group["weight_decay"],
        )

    def _tick(self, target: Target) -> int:
        """Return the time t of this update: own steps, spread over all workers if shared."""
        before = int(target.steps[0])
        target.steps[0] = before + 1
        if self.moments == "private":
            return before + 1
        return before * self.workers + 1 + self._random.randrange(self.workers)


def _check_settings(group: dict[str, Any]) -> None:
    names = ("lr", "eps", "weight_decay")
    values = {n: v.item() if isinstance(v := group[n], Tensor) else v for n in names}
    check_values(AsyncAdam.__init__, values)
    betas = group["betas"]
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not (is_pair and all(isinstance(b, Real) and 0.0 <= float(b) < 1.0 for b in betas)):
        raise ValueError(f"betas={group['betas']!r}, expected two numbers in [0, 1)")


def _check_parameter(parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise ValueError(
            "a parameter has no shape yet, so nothing can be shared; run the lazy module once on "
            "an example before AsyncAdam is built"
        )
    shape = tuple(parameter.shape)
    if parameter.device.type != "cpu":
        raise ValueError(
            f"a parameter of shape {shape} is on {parameter.device}; workers share the memory of "
            "the CPU: call model.cpu() first"
        )
    if not parameter.is_floating_point() or parameter.is_sparse:
        raise ValueError(
            f"a parameter of shape {shape} is {parameter.dtype}, {parameter.layout}; expected a "
            "dense tensor of real floating-point numbers"
        )
