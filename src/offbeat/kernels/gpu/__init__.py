"""Kernels for GPUs in Triton, each one launch for a whole message instead of several per layer.

Triton comes with PyTorch for CUDA. ``torch.compile`` could fuse the same passes, but it compiles a
list of layers anew for every model, its code and its rounding change with the version, and it has
no exact compaction. Triton kernels read layers where they lie, through a table of addresses.
"""
