"""torch.optim.SGD (without dampening) on arrays whose leading axis is the rank."""

from dataclasses import dataclass

from reference.participants import Array


@dataclass(frozen=True)
class SGD:
    """Settings of the optimizer; its state, one velocity per parameter, is passed and returned."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def step(self, params: Array, grads: Array, velocity: Array) -> tuple[Array, Array]:
        """g += wd p;  v = mu v + g, v_0 = 0;  p -= lr v, or with Nesterov p -= lr (g + mu v)."""
        grads = grads + self.weight_decay * params
        velocity = self.momentum * velocity + grads
        direction = grads + self.momentum * velocity if self.nesterov else velocity
        return params - self.lr * direction, velocity
