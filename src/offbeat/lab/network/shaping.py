"""The queueing disciplines of links, as commands of ``tc``: token buckets and netem."""

from offbeat.lab.network import iproute
from offbeat.lab.network.wire import Wire

# The kernel passes segments of up to 64 kB, many packets in one, to the token bucket. A bucket
# smaller than a segment does not reach its rate; after a pause, one of this size lets 128 KiB pass
# above the rate.
_BURST = 128 * 1024
_BURST_SECONDS = 1e-3
# How long a packet may queue in a link before packets are dropped, beside a round trip: similar
# to the buffer of a switch. Gloo fills it only where several nodes send to one; that reaches line
# rate too. With the bandwidth-delay product, so does one TCP connection under cubic.
_QUEUE_SECONDS = 0.05
_MOST = 2**32 - 1  # bytes of a queue, in tc
_PACKETS = 2**24  # in netem: the token buckets limit


def has_netem(namespace: str) -> bool:
    """Return whether the kernel has netem, which it loads if it is a module."""
    try:
        iproute.batch("tc", ["qdisc add dev lo root netem delay 1ms"], namespace)
    except iproute.Unavailable:
        return False
    iproute.batch("tc", ["qdisc del dev lo root"], namespace)
    return True


def bucket(device: str, wire: Wire, round_trip: float, parent: str = "root") -> list[str]:
    """Return the commands that limit what a device sends to the rate of ``wire``."""
    if wire.rate is None:
        return []
    burst = max(_BURST, round(wire.rate / 8 * _BURST_SECONDS))
    limit = min(_MOST, burst + round(wire.rate / 8 * (_QUEUE_SECONDS + round_trip)))
    settings = f"rate {wire.rate}bit burst {burst}b limit {limit}b"
    return [f"qdisc add dev {device} {parent} tbf {settings}"]


def netem(device: str, wire: Wire) -> list[str]:
    """Return the commands that delay and lose what a device sends; a bucket may be its child."""
    delay = f"delay {wire.latency * 1e6:.0f}us"
    if wire.jitter:
        delay += f" {wire.jitter * 1e6:.0f}us rate 1000gbit"  # with a rate, netem keeps the order
    loss = f" loss random {wire.loss * 100:g}%" if wire.loss else ""
    return [f"qdisc add dev {device} root handle 1: netem limit {_PACKETS} {delay}{loss}"]
