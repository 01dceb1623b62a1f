"""Algorithms as the text of their parts: an exchange for each slot, joined by a plus."""

import ast
from collections.abc import Callable
from typing import Any

import offbeat.methods as methods
from offbeat.exchange import Algorithm, Exchange, GradientExchange, ParameterExchange
from offbeat.exchange.algorithm import Auto
from offbeat.methods import Cycle, Sparse
from offbeat.settings import parse_expression
from offbeat.topology import BipartiteExponential, Complete, Exponential, Phases, Ring, Symmetric

_EXCHANGES = {
    name: kind
    for name, kind in vars(methods).items()
    if isinstance(kind, type) and issubclass(kind, Exchange)
}
del _EXCHANGES["Compressed"]  # a compressor is a class, which has no text
_TOPOLOGIES = BipartiteExponential, Complete, Exponential, Phases, Ring, Symmetric
_SETTINGS = *_TOPOLOGIES, Auto, Cycle, Sparse
NAMED: dict[str, Callable[..., Any]] = {
    "Algorithm": Algorithm,
    **_EXCHANGES,
    **{kind.__name__: kind for kind in _SETTINGS},
}


def compose(text: str) -> Algorithm:
    """Parse exchanges joined by a plus, or what an algorithm prints.

    Arguments are literals, and calls of topologies, :class:`offbeat.methods.Cycle` and others
    that exchanges take. Raises ``ValueError`` for anything else, such as functions, which have no
    text, and for two exchanges of one slot.

    >>> pair = compose("TopK(density=0.01, over='local') + PushSum(topology=Ring(), over='node')")
    >>> pair == compose(repr(pair))
    True
    """
    node = parse_expression(text)
    parts = [] if node is None else [_value(part, text) for part in _operands(node)]
    if len(parts) == 1 and isinstance(parts[0], Algorithm):
        return parts[0]
    found: dict[str, Any] = {}
    for part in parts:
        kinds = {"gradients": GradientExchange, "parameters": ParameterExchange}
        slot = next((name for name, kind in kinds.items() if isinstance(part, kind)), "")
        if not slot or slot in found:
            what = f"a second exchange of {slot}" if slot else "no exchange"
            raise ValueError(
                f"{text!r}: {part!r} is {what}; join one exchange of gradients and one of "
                "parameters"
            )
        found[slot] = part
    if not found:
        raise ValueError(_unreadable(text))
    return Algorithm(**found)


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_operands(node.left), *_operands(node.right)]
    return [node]


def _value(node: ast.expr, text: str) -> Any:
    """Return the value of a literal, of a name or call of :data:`NAMED`, or of a tuple of them."""
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, text) for item in node.elts)
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Name):
        try:
            return ast.literal_eval(node)
        except (TypeError, ValueError):  # the first for a list as a key
            raise ValueError(_unreadable(text)) from None
    if called.id not in NAMED:
        raise ValueError(
            f"unknown name {called.id!r} in {text!r}; expected one of {', '.join(NAMED)}, or a "
            "recipe alone"
        )
    call = node if isinstance(node, ast.Call) else ast.Call(called, [], [])
    args = [_value(arg, text) for arg in call.args]
    named = {str(k.arg): _value(k.value, text) for k in call.keywords}
    if len(named) < len(call.keywords):
        raise ValueError(f"{text!r}: {called.id} has an argument twice")
    try:
        return NAMED[called.id](*args, **named)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from None


def _unreadable(text: str) -> str:
    return (
        f"cannot read the algorithm {text!r}; expected exchanges with literal arguments, for "
        "example \"TopK(density=0.01, over='local') + PushSum(over='node')\""
    )
