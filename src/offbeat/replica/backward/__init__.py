"""The exchange of gradients in backward: hooks, and the steps that must come between."""
