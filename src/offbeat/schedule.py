"""When to exchange: integers only, the same answer on every rank."""


def due(step: int, every: int) -> bool:
    r"""Whether an exchange that acts every ``every`` steps acts after ``step`` earlier ones.

    .. math:: (k + 1) \bmod every = 0

    >>> [step for step in range(8) if due(step, every=4)]
    [3, 7]
    """
    return (step + 1) % every == 0
