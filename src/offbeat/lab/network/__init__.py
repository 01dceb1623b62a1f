"""The network between emulated nodes: namespaces, bridges, links and what delays packets on them.

Token buckets of the kernel limit rates. Latency, jitter and random loss come from the kernel's
netem where it has that, else from the delay line, a process that carries frames between TAP
devices.
"""
