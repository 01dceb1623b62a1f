"""How soon each method reaches the loss of ddp: the figures of the guide."""
