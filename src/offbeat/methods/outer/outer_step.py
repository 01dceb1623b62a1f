"""DiLoCo and Streaming DiLoCo: an outer optimizer that steps the mean of the models."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, final

from torch import Tensor

from offbeat.exchange import BoundParameters, ParameterExchange, Saved, Site, Variable, nested
from offbeat.exchange.interface import OnLoss
from offbeat.exchange.weights import Window
from offbeat.functional import divide_layers
from offbeat.methods.outer.fragment import Fragment, Wire
from offbeat.methods.outer.optimizer import builder_of
from offbeat.methods.outer.sparse_mean import Sparse
from offbeat.settings import at_least, between, check_settings, describe
from offbeat.topology.schedule import due
from offbeat.transport.collectives import peers_of_mean


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class OuterStep(ParameterExchange):
    r"""Step a shared anchor by an outer optimizer every ``every`` steps (DiLoCo).

    .. math::
        \Delta = a - \frac{1}{n} \sum_{j=1}^{n} x_j, \quad
        a \leftarrow \mathrm{outer}(a, \Delta), \quad
        x_i \leftarrow \alpha x_i + (1 - \alpha) a
        \quad \text{if } (k+1) \bmod every = 0

    for n participants after k earlier steps. The anchor a is the same on all of them; the
    pseudo-gradient takes the place of its gradient.

    Args:
        every: the paper's H, steps between two exchanges of a parameter.
        outer: the optimizer of the anchor: text that names an element-wise optimizer of
            ``torch.optim`` with literal arguments, or a function that builds one from a list of
            parameters. Anchors are flat tensors, and between nodes slices of them: the function
            must build an optimizer that treats every element by itself (SGD, Adam; not Muon,
            LAMB).
        fragments: the paper's P. Whole layers are divided into this many sets of about equal
            bytes (:func:`offbeat.functional.divide_layers`), which take turns: fragment p is
            exchanged when (k+1) mod every = floor(p every / P).
        delay: the paper's tau. The mean travels while training continues, and is merged exactly
            this many steps after it was sent. A step blocks only if it has not arrived by then.
        mixing: the paper's alpha, the weight of this rank's own parameters in the merge; None
            for 0 without a delay and 1/2 with one. 0 discards the steps made since the
            parameters were sent. With :class:`Sparse` 0 only, also with a delay.
        wire: "bf16" or "int8" sends differences to the anchor in 16 or 8 bits, the latter with a
            float32 scale for every 256 values. What rounding takes from them, and from their
            mean, is added to the next ones, so that nothing is lost (error feedback).
            :class:`Sparse` sends the largest entries of the differences, and keeps the others
            for the next ones (SparseLoCo). ``finish()`` discards what is kept: the average is
            that of the parameters themselves.
        over: "world" for ranks as participants, "node" for nodes: then each local rank exchanges
            and steps its slice, and the node gathers all slices.

    Everything is kept in float32 for 16-bit parameters, and what their rounding takes is carried
    to the next mean. SGD with a learning rate of 1 and no momentum is ``Average``, bit for bit
    (for 16-bit parameters but for what is carried).

    The anchor begins with the parameters at the attach, and ``finish()`` sets it to the average
    and resets the outer optimizer. Load a model before ``replicate()``, or call ``finish()``
    after loading; otherwise the first step is an error on all ranks. Later in a run call
    ``finish()`` before loading too, or a mean in flight is merged into the model that was loaded.
    Between exchanges the average is the mean of the parameters, each merged with what is in flight.

    Raises ``ValueError`` on all ranks for a mean that is not finite; anchor and parameters keep
    their values.

    Bytes sent per step: 2 (n-1)/n of the model's divided by ``every``, at most one fragment's at
    a time unless ``delay`` exceeds every/P; float32 for 16-bit parameters; of float32 a half with
    "bf16" and 0.254 with "int8". With :class:`Sparse` n-1 messages divided by ``every``, of
    density (1.5 + bits/8) + 1/512 bytes for each parameter (density (1.5 + itemsize) in full
    precision).

    Extra memory: a mean and an anchor, and the outer optimizer's state (SGD with momentum: one
    model); during an outer step one fragment more, with Nesterov momentum two, and with 16-bit
    parameters another; "bf16" adds 2 + 1/n models and "int8" 1.5 + 1/n, for errors and messages,
    and :class:`Sparse` one, n messages, and 16 bytes for each entry sent. With ``over="node"`` all
    but the mean are divided between the ranks of the node. Passes over memory per exchange: eight;
    with :class:`Sparse` ten.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
    Models", Algorithm 1; Douillard et al. 2025, "Streaming DiLoCo with overlapping communication",
    Algorithm 2; Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo",
    Algorithm 1.

    >>> OuterStep(every=100, fragments=4, delay=5).alpha
    0.5
    """

    every: Annotated[int, at_least(1, "steps")] = 100
    outer: (
        Annotated[str, "such as 'SGD(lr=0.7, momentum=0.9)'"]
        | Annotated[Callable[..., Any], "that builds a torch.optim.Optimizer"]
    ) = "SGD(lr=0.7, momentum=0.9, nesterov=True)"
    fragments: Annotated[int, at_least(1)] = 1
    delay: Annotated[int, at_least(0, "steps")] = 0
    mixing: (
        Annotated[float, between(0, 1, closed="left")] | Annotated[None, "0, or 1/2 with a delay"]
    ) = None
    wire: Wire | Annotated[None, "full precision"] = None
    over: Literal["world", "node"] = "world"
    takes_weights: ClassVar[bool] = True
    # A mean in flight is dropped: anchors, and errors of messages, are as before.
    on_loss: ClassVar[OnLoss] = "again"
    anchored: ClassVar[bool] = True  # the pseudo-gradient counts from the parameters at the attach

    def __post_init__(self) -> None:
        check_settings(self)
        builder_of(self.outer)
        for name, value in (("fragments", self.fragments), ("delay", self.delay)):
            if value > self.every:
                raise ValueError(
                    f"{name}={value} with every={self.every}: an exchange of a fragment would "
                    f"begin before the last has ended; use {name} <= every"
                )
        if isinstance(self.wire, Sparse) and self.mixing:
            raise ValueError(
                f"mixing={self.mixing} with {self.wire}: what is not sent would count twice, in a "
                "rank's own parameters and in what waits; use mixing=0"
            )

    def __repr__(self) -> str:
        return describe(self)

    @property
    def alpha(self) -> float:
        """The weight of a rank's own parameters in the merge."""
        if self.mixing is not None:
            return self.mixing
        return 0.5 if self.delay and not isinstance(self.wire, Sparse) else 0.0

    def peers(self, site: Site) -> Collection[int] | None:
        """Return none, as means are sums or gathers; any for 16 and 8 bits."""
        if self.wire is not None and not isinstance(self.wire, Sparse):
            return None
        return peers_of_mean(site.parameters.values())

    def bind(self, site: Site) -> "BoundOuterStep":
        """Divide the layers, and allocate the anchor, the mean and the outer optimizer."""
        # Of the whole model, also where ranks hold shards: all ranks divide it alike.
        sizes = {name: p.numel() * p.itemsize for name, p in site.registered.items()}
        sets = divide_layers(sizes, self.fragments)
        if not all(sets):
            layers = sum(1 for names in divide_layers(sizes, len(sizes)) if names)
            raise ValueError(
                f"fragments={self.fragments} for a model of {layers} layers: a fragment is a set "
                f"of whole layers; use fragments <= {layers}"
            )
        given = self.outer, self.wire, self.delay > 0
        return BoundOuterStep(site, self, [Fragment.of(site, names, *given) for names in sets])


@dataclass(eq=False)
class BoundOuterStep(BoundParameters):
    """:class:`OuterStep` on one replica: the fragments in order of their turns."""

    site: Site
    settings: OuterStep
    fragments: list[Fragment]
    merged: int = -1  # after how many steps, last

    def state(self) -> Iterator[Variable]:
        """Yield the fragments."""
        for turn, fragment in enumerate(self.fragments):
            yield nested(str(turn), fragment)

    def step(self, step: int) -> None:
        """Merge the means that are due, then send those whose turn it is."""
        for turn, fragment in enumerate(self.fragments):
            if fragment.in_flight and self._is_turn(step - self.settings.delay, turn):
                fragment.merge(self.settings.alpha, step - self.settings.delay + 1)
            if self._is_turn(step, turn):
                fragment.send()
                if self.settings.delay == 0:
                    fragment.merge(self.settings.alpha, step + 1)
                    self.merged = step + 1

    def _is_turn(self, step: int, turn: int) -> bool:
        return due(step - self._offset(turn), self.settings.every)

    def _offset(self, turn: int) -> int:
        return turn * self.settings.every // len(self.fragments)

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters, merged with the means in flight, with weight one."""
        merged = [fragment.merged(self.settings.alpha) for fragment in self.fragments]
        views = {name: view for _, named in merged for name, view in named.items()}
        flat = [part for parts, _ in merged for part in parts]
        return flat, {name: views[name] for name in self.site.parameters}, 1.0

    @property
    def result(self) -> dict[str, Tensor] | None:
        """The stepped anchor; kept if it replaces the whole model at once, in full precision."""
        settings, fragment = self.settings, self.fragments[0]
        is_whole = settings.fragments == 1 and settings.delay == 0 == settings.alpha
        is_kept = is_whole and settings.wire is None and not fragment.is_discarded
        return fragment.layout.views(fragment.anchor) if is_kept else None

    def go_on_with(self, result: Mapping[str, Tensor], common: Saved) -> None:
        """Take over the result; no mean is in flight any more."""
        super().go_on_with(result, common)
        self.fragments[0].in_flight = False

    def windows(self) -> list[Window]:
        """Return the window of the fragment of each flat tensor."""
        return [fragment.window for fragment in self.fragments for _ in fragment.flat]

    def reset(self) -> None:
        """Start anew from equal replicas: anchor = parameters, no momentum, nothing in flight."""
        self.merged = -1
        for fragment in self.fragments:
            fragment.restart()

    def unsent(self) -> list[Tensor]:
        """Return what the messages of all fragments have lost."""
        return [tensor for fragment in self.fragments for tensor in fragment.unsent()]

    def add_unsent(self, shares: Sequence[Tensor]) -> None:
        """Add to what the messages of the fragments have lost."""
        left = iter(shares)
        for fragment in self.fragments:
            fragment.add_unsent([next(left) for _ in fragment.unsent()])

    def drain(self) -> float:
        """Merge the means in flight before their time; all ranks call."""
        for fragment in self.fragments:
            if fragment.in_flight:
                fragment.merge(self.settings.alpha, 0)
        return 1.0

    def are_equal(self, steps: int) -> bool:
        """Return whether a stepped anchor of the whole model has just replaced it."""
        is_whole = len(self.fragments) == 1 and self.settings.alpha == 0
        return is_whole and self.merged == steps

    def staleness(self, step: int) -> int:
        """Return the number of steps since the newest mean merged was sent."""
        every, delay = self.settings.every, self.settings.delay
        turns = range(len(self.fragments))
        since = [(step - delay - self._offset(turn)) % every + delay for turn in turns]
        return min(step, *since)
