"""The network between emulated nodes: namespaces, bridges, links, and what delays packets."""
