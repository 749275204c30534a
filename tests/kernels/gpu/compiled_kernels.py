"""Our Triton kernels through Triton's compiler and the assembler for three kinds of GPU, which needs none of them; run
by test_triton.py in a process of its own, without the interpreter."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanok3.kernels.gpu import grouped, packed, situ_experts
from nanok3.kernels.gpu.tiles import choose

SHARED_MEMORY = 99 * 1024
"""Of one program on the consumer cards of capability 8.6 and 8.9; the others have more."""
BETAS = {"BETA": 4.0, "LINEAR_BETA": 25.0}


def compiled(kernel, types, constants, tile, capability):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    values = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    even = [i for i, n in enumerate(names) if n in types and (types[n].startswith("*") or n in ("O", "I"))]
    source = ASTSource(kernel, signature, values, {(i,): [["tt.divisibility", 16]] for i in even})
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def cases(dtype, size):
    """(name, kernel, types, constants, tile) at the sizes of training and of decoding."""
    p, i64 = f"*{dtype}", "*i64"
    table = {"tile_expert": i64, "tile_start": i64, "ends": i64, "E": "i32", "O": "i32", "I": "i32"}
    for rows in (65536, 16):
        for widest in (128, 64):
            tile = choose(rows, 64, 4096, 4096, size, widest)
            sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "PRECISION": "ieee"}
            if widest == 128:
                types = {"x": p, "w": p, "y": p, "w_expert": "i64", "w_out": "i32", "w_in": "i32", **table}
                yield "product", grouped.product_kernel, types, {**sizes, "w_in": 1}, tile
                yield "transposed", grouped.product_kernel, types, {**sizes, "w_out": 1}, tile
                types = {"dy": p, "x": p, "d": p, "ends": i64, "counts": i64, "O": "i32", "I": "i32"}
                yield "outer", grouped.outer_kernel, types, sizes, tile
                continue
            types = {"z": p, "w1": p, "w3": p, "hidden": p, "gate": p, "up": p, **table}
            yield "up", situ_experts.up_kernel, types, {**sizes, **BETAS, "KEEP": True}, tile
            types = {"x": p, "packed": "*u8", "scale": "*u8", "y": p, **table}
            yield "packed", packed.product_kernel, types, sizes, tile
            weights = dict.fromkeys(("packed1", "scale1", "packed3", "scale3"), "*u8")
            types = {"z": p, **weights, "hidden": p, **table}
            yield "packed up", packed.up_kernel, types, {**sizes, **BETAS}, tile
    for betas in (BETAS, {"BETA": None, "LINEAR_BETA": None}):
        types = dict.fromkeys(("gate", "up", "d_hidden", "hidden", "d_gate", "d_up"), p) | {"n": "i64"}
        yield "backward", situ_experts.situ_backward_kernel, types, {**betas, "SIZE": 1024}, tile


@pytest.mark.parametrize("dtype,size,capability", [("bf16", 2, 80), ("bf16", 2, 90), ("fp32", 4, 90), ("bf16", 2, 100)])
def test_every_kernel_assembles_and_fits(dtype, size, capability):
    for name, kernel, types, constants, tile in cases(dtype, size):
        result = compiled(kernel, types, constants, tile, capability)
        assert result.asm["cubin"], name
        assert capability >= 100 or result.metadata.shared <= SHARED_MEMORY, f"{name}: {result.metadata.shared}"
        if capability == 90 and dtype == "bf16" and tile.rows >= 64 and name in ("product", "transposed", "up"):
            assert "wgmma" in result.asm["ptx"], f"{name} misses Hopper's tensor cores"
