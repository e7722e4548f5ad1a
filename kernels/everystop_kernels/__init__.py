"""The operations of the forward.

`ops` is the seam: what the operations are, and which implementations of them exist. `torch_ops` is the one that runs
everywhere, one op a file. `reference` is the oracle that every implementation is tested against.
"""
