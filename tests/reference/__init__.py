"""Plain numpy float64 references, written from the specification alone: no torch, no groups."""
