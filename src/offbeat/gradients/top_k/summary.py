"""Statistics of sparsification: compression ratios and share of the possible speedup."""

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.functional import max_speedup, speedup
from offbeat.gradients.message import FeedbackMessage
from offbeat.gradients.top_k.timing import LayerTimes


def summary(
    ratios: Mapping[str, float],
    messages: Sequence[FeedbackMessage],
    times: LayerTimes | None,
    waited: float,
) -> dict[str, Any]:
    """Return ``replica.stats()["lags"]``: ratios c_l and, once measured, times in seconds.

    ``c_max`` is the largest ratio, with which the bound on convergence grows (eq. 17). ``S_max``
    is the bound of eq. 19 and ``share`` the share of its gain that is reached: the exchange takes
    t_c in all, of which the last step waited ``waited`` seconds.
    """
    found: dict[str, Any] = {
        "c": dict(ratios),
        "c_max": max(ratios.values()),
        "messages": len(messages),
    }
    if times is None:
        return found
    exchange = sum(message.seconds(times.link) for message in messages)
    hidden = min(max(0.0, exchange - waited), times.backward)
    bound = max_speedup(times.forward, times.backward, exchange) if exchange > 0 else 1.0
    reached = speedup(times.forward, times.backward, exchange, hidden)
    return found | {
        "t_comp": dict(times.compute),
        "t_spar": dict(times.select),
        "t_forward": times.forward,
        "t_comm": exchange,
        "latency": times.link.latency,
        "seconds_per_byte": times.link.per_byte,
        "S_max": bound,
        "share": (reached - 1) / (bound - 1) if bound > 1 else 1.0,
    }
