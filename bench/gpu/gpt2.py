"""A transformer with the shapes of GPT-2."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear


@dataclass(frozen=True)
class Shape:
    """The size of a model, and the tokens of a batch."""

    width: int
    depth: int
    heads: int
    context: int
    tokens: int  # of the vocabulary
    batch: int = 2


SMALL = Shape(width=768, depth=12, heads=12, context=1024, tokens=50257)


class GPT2(nn.Module):
    """A causal transformer whose last layer is its embedding: 124 million parameters if small."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        width = shape.width
        self.token = nn.Embedding(shape.tokens, width, device=device)
        self.position = nn.Embedding(shape.context, width, device=device)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, shape.heads, 4 * width, dropout=0.0, activation="gelu", norm_first=True,
                batch_first=True, device=device,
            )
            for _ in range(shape.depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting each token of (n, length) from those before it."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        chances = linear(self.norm(x), self.token.weight)
        return cross_entropy(chances[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
