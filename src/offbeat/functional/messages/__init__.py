"""Short messages with error feedback: 16 or 8 bits, or the largest entries."""
