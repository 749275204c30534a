"""Device code: leaves that import nothing of ours and are imported only when first used.

`cpu/*.cpp` are C++ kernels, `native` builds and loads them, `kda_cpu` gives the KDA kernel its torch face.
"""
