"""Buckets of gradients: filled during backward, launched in one order, completed at its end."""
