"""The outer optimizer: any element-wise one of torch, on flat anchors, saved by parameter name."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.functional import pseudo_gradient
from offbeat.settings import read_call

Builder = Callable[[Sequence[nn.Parameter]], Optimizer]
ByName = Callable[[Sequence[Tensor]], dict[str, Tensor]]

# Those that treat every element by itself: anchors are flat, and between nodes slices of them.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD",
)  # fmt: skip


def builder_of(outer: str | Builder) -> Builder:
    """Return what builds the optimizer that ``outer`` describes.

    Raises ``ValueError`` for a text that names no element-wise optimizer of ``torch.optim``, and
    for arguments that it refuses.

    >>> builder_of("SGD(lr=0.7, momentum=0.9)")([nn.Parameter(torch.zeros(1))]).defaults["lr"]
    0.7
    >>> builder_of("Muon")
    Traceback (most recent call last):
    ValueError: outer='Muon', expected one of SGD, Adam, AdamW, NAdam, ... ASGD ...
    """
    build = outer
    if isinstance(outer, str):
        complaint, example = "cannot read the outer optimizer", "'SGD(lr=0.7, momentum=0.9)'"
        name, args, kwargs = read_call(outer, complaint, example)
        if name not in ELEMENTWISE:
            raise ValueError(
                f"outer={outer!r}, expected one of {', '.join(ELEMENTWISE)} of torch.optim, which "
                "treat every element of a parameter by itself"
            )
        kind = getattr(torch.optim, name)

        def build(anchors: Sequence[nn.Parameter]) -> Optimizer:
            optimizer: Optimizer = kind(anchors, *args, **kwargs)
            return optimizer

    assert not isinstance(build, str), "a text was read"
    _probe(build, outer)
    return build


@final
class OuterOptimizer:
    """Steps anchors in place; ``anchors`` are flat, one for each section of a layout."""

    def __init__(self, outer: str | Builder, anchors: Sequence[Tensor]) -> None:
        """Take hold of ``anchors``, whose memory is shared."""
        self._outer, self._build = outer, builder_of(outer)
        self._anchors = [nn.Parameter(anchor, requires_grad=False) for anchor in anchors]
        self._kinds = _probe(self._build, outer)
        self.reset()

    def reset(self) -> None:
        """Forget all earlier steps."""
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.device("cpu"):
            self._optimizer = self._build(self._anchors)
        self._has_stepped = False

    def step(self, means: Sequence[Tensor]) -> None:
        """Step the anchors by the pseudo-gradients of ``means``, which are overwritten."""
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.grad = torch.empty_like(anchor)
            pseudo_gradient(anchor, mean, anchor.grad)
        with torch.device("cpu"):  # counters of steps are made on the default device
            self._optimizer.step()
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.add_(mean)  # what rounding has taken from the pseudo-gradient
            anchor.grad = None
        self._has_stepped = True

    def preview(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return what :meth:`step` would make of the anchors, and change nothing."""
        anchors = [anchor.detach().clone() for anchor in self._anchors]
        other = OuterOptimizer(self._outer, anchors)
        if self._has_stepped:
            other._set_state(deepcopy(self._state))
        other.step([mean.clone() for mean in means])
        return anchors

    @property
    def memory(self) -> list[Tensor]:
        """The tensors of the state, as large as anchors."""
        states = self._state if self._has_stepped else []
        return [v for s in states for v in s.values() if isinstance(v, Tensor) and v.numel() > 1]

    def save(self, by_name: ByName) -> dict[str, Any]:
        """Return the state: tensors by parameter name, and numbers, one for each section."""
        tensors, numbers = {}, {}
        for key, kind in self._kinds.items():
            if _is_elementwise(kind):
                now = [state[key] for state in self._state] if self._has_stepped else self._zeros()
                tensors[key] = by_name(now)
            else:
                numbers[key] = [float(state[key]) for state in self._state if self._has_stepped]
        return {"has_stepped": self._has_stepped, "tensors": tensors, "numbers": numbers}

    def unfit(self, saved: dict[str, Any]) -> str | None:
        """Return why :meth:`load` cannot take ``saved`` over, or None."""
        count = len(self._anchors) if saved["has_stepped"] else 0
        for key, numbers in saved["numbers"].items():
            if len(numbers) != count or not all(type(n) is float for n in numbers):
                return (
                    f"the outer optimizer has {key}={ascii(numbers)[:40]}, expected {count} numbers"
                )
        return None

    def load(self, saved: dict[str, Any], fill: Callable[[Sequence[Tensor], Any], None]) -> None:
        """Restore what :meth:`save` returned; ``fill`` copies from tensors by name."""
        self.reset()
        if not saved["has_stepped"]:
            return
        with torch.inference_mode(False):
            states: list[dict[str, Any]] = [{} for _ in self._anchors]
            for key, kind in self._kinds.items():
                if _is_elementwise(kind):
                    restored = self._zeros()
                    fill(restored, saved["tensors"][key])
                else:
                    restored = [_like(kind, number) for number in saved["numbers"][key]]
                for state, value in zip(states, restored, strict=True):
                    state[key] = value
        self._set_state(states)

    @property
    def _state(self) -> list[dict[str, Any]]:
        return [self._optimizer.state[anchor] for anchor in self._anchors]

    def _set_state(self, states: list[dict[str, Any]]) -> None:
        for anchor, state in zip(self._anchors, states, strict=True):
            self._optimizer.state[anchor] = state
        self._has_stepped = True

    def _zeros(self) -> list[Any]:
        return [torch.zeros_like(anchor) for anchor in self._anchors]


def _probe(build: Builder, outer: object) -> dict[str, Any]:
    """Return the state of one parameter of two elements after a step, if it can be made."""
    parameter = nn.Parameter(torch.zeros(2, device="cpu"), requires_grad=False)
    parameter.grad = torch.zeros(2, device="cpu")
    try:
        with torch.inference_mode(False), torch.device("cpu"):
            optimizer = build([parameter])
            optimizer.step()
            if not parameter.isfinite().all():
                raise ValueError("a step by a gradient of 0 is not finite")
            return dict(optimizer.state[parameter])
    except Exception as error:  # optimizers do not check all that they are given
        raise ValueError(
            f"outer={outer!r}: {error}; give a text such as 'SGD(lr=0.7, momentum=0.9)', or a "
            "function that takes a list of parameters and returns a torch.optim.Optimizer"
        ) from None


def _is_elementwise(kind: Any) -> bool:
    return isinstance(kind, Tensor) and kind.shape == (2,)


def _like(kind: Any, number: float) -> Any:
    if isinstance(kind, Tensor):
        return torch.tensor(number, dtype=kind.dtype, device="cpu")
    return type(kind)(number)
