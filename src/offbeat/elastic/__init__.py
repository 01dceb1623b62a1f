"""Changes of the set of ranks: losses that a run survives, and ranks that join it."""
