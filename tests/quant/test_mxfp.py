"""MXFP4 and MXFP8: the bits, three scale rules, one golden table, and where they are installed, other libraries."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.model.mxfp4 import MAGNITUDES, block_exponent, dequantize_mxfp4, quantize_mxfp4
from nanok3.quant.llama_cpp import quantize_mxfp4 as exported
from nanok3.quant.mxfp import (
    MXFP4,
    MXFP8,
    SCALE_RULES,
    decode,
    dequantize_mxfp8,
    project,
    quantize_mxfp8,
    reference_block,
    reference_exponent,
)

ELEMENTS = {"MXFP4": MXFP4, "MXFP8": MXFP8}
GOLDEN = json.loads((Path(__file__).parent.parent / "fixtures" / "mxfp" / "scale_bytes.json").read_text())
AMAX = torch.tensor([float.fromhex(row["amax"]) for row in GOLDEN], dtype=torch.float64)


def golden(element: str, rule: str) -> list[int]:
    return [row[element][rule] for row in GOLDEN]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Equality that tells -0 from 0."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def wide(rows: int = 48, columns: int = 96) -> torch.Tensor:
    """Blocks of every size, with ties, zeros and a block of nothing but zeros."""
    x = torch.randn(rows, columns) * torch.logspace(-18, 18, rows)[:, None]
    x[0] = 0
    x[1, :8] = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 0.25, -0.0, -7.0])
    return x


# ---------------------------------------------------------------------- elements


def test_codes_are_those_of_the_formats() -> None:
    assert [float(decode(code, MXFP4)) for code in range(8)] == list(MAGNITUDES)
    assert float(decode(9, MXFP4)) == -0.5
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for code, value in enumerate(codes.tolist()):
        if not math.isnan(value):  # 127 and 255, where counting on would give 480
            assert float(decode(code, MXFP8)) == value
    for element in ELEMENTS.values():
        assert element.top == max(MAGNITUDES) or element.top == torch.finfo(torch.float8_e4m3fn).max


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_projection_equals_the_reference(name: str, rule: str) -> None:
    element, draw = ELEMENTS[name], random.Random(3)
    for _ in range(12):
        values = [draw.gauss(0, 1) * 10 ** draw.uniform(-4, 4) for _ in range(30)] + [0.0, -0.0]
        codes, byte = reference_block(values, element, rule)
        exact = [float(decode(code, element) * Fraction(2) ** (byte - 127)) for code in codes]
        top = 1 << element.fraction + element.exponent
        exact = [-0.0 if code == top else value for code, value in zip(codes, exact)]
        got = project(torch.tensor(values, dtype=torch.float64), element, rule)
        assert torch.equal(bits(got), bits(torch.tensor(exact, dtype=torch.float64)))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_projection_equals_packing_and_unpacking_bit_for_bit(dtype: torch.dtype, rule: str) -> None:
    x = wide().to(dtype)
    four = dequantize_mxfp4(*quantize_mxfp4(x, rule), dtype)
    assert torch.equal(bits(project(x, MXFP4, rule)), bits(four))
    eight = dequantize_mxfp8(*quantize_mxfp8(x, rule), dtype)
    assert torch.equal(bits(project(x, MXFP8, rule)), bits(eight))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_projecting_twice_changes_nothing(name: str, rule: str) -> None:
    once = project(wide(), ELEMENTS[name], rule)
    assert torch.equal(bits(project(once, ELEMENTS[name], rule)), bits(once))


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32), st.sampled_from(SCALE_RULES))
def test_float32_and_float64_agree(values: list[float], rule: str) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    for element in ELEMENTS.values():
        assert torch.equal(project(x, element, rule), project(x.float(), element, rule).double())


def test_what_is_not_finite_is_refused_or_shows() -> None:
    x = torch.ones(2, 32)
    x[1, 3] = torch.nan
    assert project(x, MXFP8)[1, 3].isnan() and torch.equal(project(x, MXFP8)[0], x[0])
    for value in (math.nan, math.inf, -math.inf):
        x[1, 3] = value
        with pytest.raises(ValueError, match="inf or NaN"):
            quantize_mxfp8(x)
        with pytest.raises(ValueError, match="no place for"):
            reference_block(x[1].tolist(), MXFP4)


def test_widths_and_rules_are_checked() -> None:
    with pytest.raises(ValueError, match="a multiple of 32, got 48"):
        project(torch.zeros(2, 48), MXFP8)
    for form in (lambda: block_exponent(torch.ones(1), "round"), lambda: reference_exponent(Fraction(1), MXFP4, "up")):
        with pytest.raises(ValueError, match="allowed: ceil, floor, even"):
            form()


# ---------------------------------------------------------------------- scales: one table for all


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_the_golden_table(name: str, rule: str) -> None:
    """Reference and fast form; the table holds powers of two, 6 x 2^n, 7 x 2^n and neighbours, 0 and denormals."""
    element = ELEMENTS[name]
    assert [reference_exponent(Fraction(a), element, rule) + 127 for a in AMAX.tolist()] == golden(name, rule)
    assert (block_exponent(AMAX, rule, element.top, element.fraction) + 127).tolist() == golden(name, rule)
    narrow = AMAX.float()
    kept = narrow.double() == AMAX
    fast = (block_exponent(narrow, rule, element.top, element.fraction) + 127)[kept].tolist()
    assert fast == [byte for byte, same in zip(golden(name, rule), kept.tolist()) if same]


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_training_export_and_serving_keep_to_the_golden_table(rule: str) -> None:
    """Training: the scale is seen in what it does to a small neighbour. Export and serving: the stored byte."""
    blocks = torch.zeros(len(AMAX), 32, dtype=torch.float64)
    blocks[:, 7] = -AMAX
    assert quantize_mxfp4(blocks, rule)[1].flatten().tolist() == golden("MXFP4", rule)
    assert quantize_mxfp8(blocks, rule)[1].flatten().tolist() == golden("MXFP8", rule)
    if rule == "ceil":
        assert exported(blocks)[1].flatten().tolist() == golden("MXFP4", rule)
    steps = torch.tensor(golden("MXFP4", rule), dtype=torch.float64).sub(127).exp2() / 2  # between 0 and the next
    blocks[:, 3] = steps
    blocks[:, 4] = steps / 2  # a tie, to even: nothing
    trained = project(blocks, MXFP4, rule)
    seen = steps <= AMAX  # else the neighbour is the largest
    assert torch.equal(trained[seen, 3], steps[seen]) and not trained[seen, 4].any()


def test_the_golden_table_by_hand() -> None:
    """A few of its lines, worked out on paper."""
    table = {float.fromhex(row["amax"]): row for row in GOLDEN}
    assert table[6.0]["MXFP4"] == {"ceil": 127, "floor": 127, "even": 127}  # 6 = 6 x 2^0
    assert table[7.0]["MXFP4"] == {"ceil": 128, "floor": 127, "even": 128}  # 1.75 x 4: rounds up to 8
    assert table[4.0]["MXFP4"] == {"ceil": 127, "floor": 127, "even": 127}  # 3 would be too small
    assert table[1.0]["MXFP4"] == {"ceil": 125, "floor": 125, "even": 125}
    assert table[448.0]["MXFP8"] == {"ceil": 127, "floor": 127, "even": 127}
    assert table[480.0]["MXFP8"] == {"ceil": 128, "floor": 127, "even": 127}  # 1.875 x 256: below 1.9375
    assert table[0.0]["MXFP4"] == {"ceil": 127, "floor": 127, "even": 127}
    assert table[2.0**-149]["MXFP8"] == {"ceil": 0, "floor": 0, "even": 0}


# ---------------------------------------------------------------------- other libraries, where installed


def torchao_blocks(x: torch.Tensor, name: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes and values. Its rule RCEIL is our ceil; its CEIL is another."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    dtype = {"MXFP4": torch.float4_e2m1fn_x2, "MXFP8": torch.float8_e4m3fn}[name]
    mode = mx.ScaleCalculationMode[{"ceil": "RCEIL"}.get(rule, rule.upper())]
    scale, data = mx.to_mx(x, dtype, 32, mode)
    return scale.view(torch.uint8), mx.to_dtype(data, scale, dtype, 32, torch.float32)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_torchao_agrees(name: str, rule: str) -> None:
    """Every byte and value, but for two things: its scale of a block of zeros is 2^-127, and its RCEIL takes a largest
    a float32 step above 6 (or 448) times a power of two for that, by the rounding of a logarithm; ours is exact."""
    x = wide()[1:]
    scale, values = torchao_blocks(x, name, rule)
    ours = (quantize_mxfp4 if name == "MXFP4" else quantize_mxfp8)(x, rule)[1]
    assert torch.equal(scale.view(ours.shape), ours)
    assert torch.equal(values, project(x, ELEMENTS[name], rule))
    blocks = torch.zeros(len(AMAX), 32)
    blocks[:, 0] = AMAX.float()
    theirs = torchao_blocks(blocks, name, rule)[0].flatten()
    other = [AMAX[i].item() for i in (theirs != torch.tensor(golden(name, rule))).nonzero().flatten()]
    over = [math.log2(a / ELEMENTS[name].top) % 1 for a in other if a]
    assert all(0 < excess < 2e-7 for excess in over) and (rule == "ceil" or not over)


def test_compressed_tensors_agrees() -> None:
    """Nibbles for our scales; and its own scales, which are those of `even`."""
    reason = "compressed-tensors is not installed"
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers", reason=reason)
    utilities = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils", reason=reason)
    x = wide()[1:] + 0.0  # it drops the sign of a zero
    largest = x.unflatten(-1, (-1, 32)).abs().amax(-1)
    for rule in SCALE_RULES:
        packed, scale = quantize_mxfp4(x, rule)
        factor = scale.double().sub(127).exp2().float()
        assert torch.equal(helpers.quantize_and_pack_fp4(x, factor, group_size=32), packed)
        if rule == "even":
            assert torch.equal(utilities.generate_mx_scales(largest).to(torch.uint8), scale)
