"""Communication: the only room that calls torch.distributed."""
