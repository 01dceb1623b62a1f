"""The kinds of models that the LAGS paper trains, small enough for two cores.

Some compute; others have the layers of the paper's models, and pause.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from bench.harness.attached import Task
from bench.harness.pause import Pause

WORDS = 4000  # of the language model


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a skip connection, 1 x 1 where shapes change."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        same = into == out and stride == 1
        self.beside = nn.Identity() if same else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(relu(self.norms[0](self.first(x)))))
        return relu(y + self.beside(x))


class Inception(nn.Module):
    """1 x 1, 3 x 3 and twice 3 x 3 convolutions and a pooled 1 x 1 one, side by side."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        part = out // 4

        def branch(wide: int, *before: nn.Module) -> nn.Module:
            more = (nn.Conv2d(part, part, 3, padding=1) for _ in range(wide))
            return nn.Sequential(*before, nn.Conv2d(into, part, 1), *more)

        pooled = branch(0, nn.MaxPool2d(3, 1, 1))
        self.branches = nn.ModuleList([branch(0), branch(1), branch(2), pooled])
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.norm(torch.cat([branch(x) for branch in self.branches], 1)))


class Reader(nn.Module):
    """A language model of two LSTM layers, with as wide an embedding or a narrow one."""

    def __init__(self, words: int, width: int, embedding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding or width)
        self.lstm = nn.LSTM(embedding or width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0]).flatten(0, 1)


def classifier(layers: Sequence[nn.Module], width: int) -> nn.Module:
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    return nn.Sequential(*layers, *head)


def resnet(width: int = 32, blocks: int = 2) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False)]
    for stage in range(4):
        out = width << stage
        layers.append(Residual(out // 2, out, 2) if stage else Residual(out, out, 1))
        layers += [Residual(out, out, 1) for _ in range(blocks - 1)]
    return classifier(layers, out)


def inception(width: int = 96, modules: int = 3) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for module in range(modules):
        layers += [Inception(width << module, width << module + 1), nn.MaxPool2d(2)]
    return classifier(layers, width << modules)


SMALLER = 16  # times fewer entries than the paper's models have
MILLION = 10**6
NOISE = 1e-4  # keeps the loss where it is, and with it the size of the gradients
Block = tuple[float, float]  # its entries in millions, and its share of the computation


class Stack(nn.Module):
    """Layers one after the other, each of which pauses forward and twice as long backward."""

    def __init__(self, blocks: Sequence[Block], seconds: float) -> None:
        super().__init__()
        sizes = [int(entries * MILLION / SMALLER) for entries, _ in blocks]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.noise = [NOISE * torch.randn(size) for size in sizes]
        total = sum(work for _, work in blocks)
        self.pauses = [seconds / 3 * work / total for _, work in blocks]

    def forward(self, x: Tensor) -> Tensor:
        for weight, noise, pause in zip(self.weights, self.noise, self.pauses, strict=True):
            x = Pause.apply(x + torch.stack([weight @ noise, x.new_zeros(())]), pause)
        return x


# Bottleneck blocks have about equal work; their entries grow with depth.
RESNET_50: tuple[Block, ...] = (
    (0.01, 0.5), *[(0.07, 1)] * 3, (0.38, 1.5), *[(0.28, 1)] * 3, (1.51, 1.5), *[(1.12, 1)] * 5,
    (6.04, 1.5), *[(4.46, 1)] * 2, (2.05, 0.01),
)  # fmt: skip
# Stem, 4 modules A, a reduction, 7 modules B, a reduction, 3 modules C, classifier.
INCEPTION_V4: tuple[Block, ...] = (
    (0.6, 2.5), *[(0.32, 0.4)] * 4, (2.3, 0.9), *[(2.9, 0.8)] * 7,
    (3.0, 0.4), *[(4.5, 0.3)] * 3, (1.5, 0.01),
)  # fmt: skip
# Embedding, two LSTM layers of 1,500 units, softmax over 10,000 words.
LSTM_PTB = ((15, 0.01), (18, 18), (18, 18), (15, 15))

Batch = tuple[Tensor, Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "resnet": (resnet, lambda: (torch.randn(8, 1, 16, 16), torch.randint(10, (8,)))),
    "inception": (inception, lambda: (torch.randn(8, 1, 16, 16), torch.randint(10, (8,)))),
    "lstm": (
        lambda: Reader(WORDS, 256),
        lambda: (torch.randint(WORDS, (4, 20)), torch.randint(WORDS, (80,))),
    ),
}
PAUSES = {  # seconds with which S_max of eq. 19 is about the paper's at 250 Mbit/s, density 0.05
    "ResNet-50": (RESNET_50, 0.12),
    "Inception-v4": (INCEPTION_V4, 0.36),
    "LSTM-PTB": (LSTM_PTB, 0.08),
}


def task(name: str) -> Task:
    """A model, and one batch for each rank: of noise, or of zeros where it pauses."""
    if name in PAUSES:
        model, batch = Stack(*PAUSES[name]), lambda: (torch.zeros(1, 2), torch.zeros(1).long())
    else:
        build, batch = MODELS[name]
        model = build()
    torch.manual_seed(1 + dist.get_rank())
    x, y = batch()
    return Task(model, lambda module, _: cross_entropy(module(x).flatten(0, -2), y))
