"""The state that a replica saves on each rank, its files, and the continuation from them."""
