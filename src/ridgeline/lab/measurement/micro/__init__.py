"""Microbenchmarks of a GPU: small CUDA C++ kernels that measure one number of the card each.

`bench` says what a microbenchmark is, `latency`, `memory`, `instructions`, `atomics` and `launches` hold them, `parts`
lists them, `runs` runs them, `kept` keeps what was measured, and `published` has what papers and data sheets say.
"""
