"""CUDA: fla-core's kernels where it has them (`fla`), Triton kernels of our own where it has none.

Nothing here is imported before tensors lie on a CUDA device. `language` is the one door to Triton, `tiles` deals the
rows of experts out to programs, `grouped` and `situ_experts` are the products of the routed experts, `mxfp4` the same
on packed weights. Triton's interpreter runs them on a CPU, which is how the tests check them.
"""
