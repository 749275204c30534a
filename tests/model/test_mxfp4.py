"""MXFP4: official bytes to exact values, and values back to the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nanok3.model.mxfp4 import MAGNITUDES, dequantize_mxfp4, quantize_mxfp4

STORED = load_file(Path(__file__).parent.parent / "fixtures" / "mxfp4" / "cases.safetensors")
CASES = ["typical", "single_block", "wide", "all_bytes", "all_scales"]


def bits(x):
    """Equality that tells -0 from 0 and a NaN from another."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def decode_by_hand(packed, scale):
    """Element by element, from the text of architecture 2.8."""
    rows, half = packed.shape
    values = torch.zeros(rows, 2 * half, dtype=torch.float64)
    for r in range(rows):
        for c in range(2 * half):
            byte = int(packed[r, c // 2])
            nibble = byte & 15 if c % 2 == 0 else byte >> 4
            sign = -1.0 if nibble & 8 else 1.0
            values[r, c] = sign * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[nibble & 7] * 2.0 ** (int(scale[r, c // 32]) - 127)
    return values


@pytest.mark.parametrize("case", CASES)
def test_float64_is_exact(case):
    out = dequantize_mxfp4(STORED[f"{case}.weight_packed"], STORED[f"{case}.weight_scale"], torch.float64)
    assert torch.equal(bits(out), bits(STORED[f"{case}.dequant_f64"]))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_equals_the_official_decompressor(case):
    """Bit for bit, values beyond the range of bfloat16 (inf) and its subnormals included."""
    out = dequantize_mxfp4(STORED[f"{case}.weight_packed"], STORED[f"{case}.weight_scale"])
    official = STORED[f"{case}.official_bf16"]
    assert out.dtype == torch.bfloat16
    # Where the factor itself is out of range, 0 * inf is not a number there; ours keeps what the format says.
    same = bits(out) == bits(official)
    assert bool((same | ~torch.isfinite(official)).all())
    assert torch.equal(out.isinf(), official.isinf())


@pytest.mark.parametrize("case", CASES)
def test_float32_is_exact_where_it_reaches(case):
    out = dequantize_mxfp4(STORED[f"{case}.weight_packed"], STORED[f"{case}.weight_scale"], torch.float32)
    exact = STORED[f"{case}.dequant_f64"]
    assert torch.equal(bits(out), bits(exact.float()))


def test_item_05_low_nibble_first_bias_127_blocks_along_the_input():
    """Item 5: nibble order, E8M0 bias, block along the input dimension; each against a wrong reading."""
    packed = torch.randint(0, 256, (3, 48), dtype=torch.uint8)
    scale = torch.randint(120, 130, (3, 3), dtype=torch.uint8)
    right = decode_by_hand(packed, scale)
    assert torch.equal(dequantize_mxfp4(packed, scale, torch.float64), right)
    high_first = dequantize_mxfp4((packed >> 4) | (packed << 4), scale, torch.float64)
    bias_128 = dequantize_mxfp4(packed, scale - 1, torch.float64)
    along_rows = dequantize_mxfp4(packed, scale.flatten().view(3, 3).T.contiguous(), torch.float64)
    for wrong in (high_first, bias_128, along_rows):
        assert not torch.equal(wrong, right)


def test_item_07_it_is_no_affine_int4():
    """Item 7: a loader that reads the nibbles as affine int4 with the same group size gives garbage."""
    packed, scale = STORED["typical.weight_packed"], STORED["typical.weight_scale"]
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).double()
    factor = torch.ldexp(torch.ones(scale.shape, dtype=torch.float64), scale.int() - 127).repeat_interleave(32, dim=-1)
    affine, right = (nibbles - 8) * factor, dequantize_mxfp4(packed, scale, torch.float64)
    assert (affine - right).norm() > 0.5 * right.norm()


def test_stacked_experts_decode_like_each_alone():
    packed = torch.randint(0, 256, (4, 3, 32), dtype=torch.uint8)
    scale = torch.randint(100, 140, (4, 3, 2), dtype=torch.uint8)
    together = dequantize_mxfp4(packed, scale)
    assert torch.equal(together, torch.stack([dequantize_mxfp4(p, s) for p, s in zip(packed, scale)]))


# ------------------------------------------------------------------ packing


@pytest.mark.parametrize("case", ["typical", "single_block", "wide", "all_bytes"])
def test_packed_values_come_back_exactly(case):
    exact = STORED[f"{case}.dequant_f64"]
    packed, scale = quantize_mxfp4(exact)
    assert torch.equal(bits(dequantize_mxfp4(packed, scale, torch.float64)), bits(exact))


def test_packing_is_idempotent():
    weight = torch.randn(6, 96)
    packed, scale = quantize_mxfp4(weight)
    again = quantize_mxfp4(dequantize_mxfp4(packed, scale))
    assert torch.equal(dequantize_mxfp4(*again), dequantize_mxfp4(packed, scale))
    assert packed.shape == (6, 48) and scale.shape == (6, 3)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32),
    st.integers(-100, 100),
)
def test_no_value_is_cut_off_and_each_goes_to_its_nearest(values, exponent):
    weight = torch.tensor([values], dtype=torch.float64) * 2.0**exponent
    packed, scale = quantize_mxfp4(weight)
    got = dequantize_mxfp4(packed, scale, torch.float64)[0]
    step = 2.0 ** (int(scale) - 127)
    grid = torch.tensor([s * m * step for m in MAGNITUDES for s in (1, -1)], dtype=torch.float64)
    assert weight.abs().max() <= 6 * step, "the largest is not cut off"
    nearest = (weight[0][:, None] - grid).abs().amin(1)
    torch.testing.assert_close((weight[0] - got).abs(), nearest, rtol=1e-12, atol=0)


def test_the_scale_is_the_smallest_that_cuts_nothing_off():
    for largest, exponent in [(6.0, 0), (6.0000001, 1), (3.0, -1), (1.0, -2), (0.75, -3), (0.76, -2), (100.0, 5)]:
        weight = torch.zeros(1, 32, dtype=torch.float64)
        weight[0, 5] = -largest
        assert int(quantize_mxfp4(weight)[1]) - 127 == exponent, largest


def test_ties_go_to_the_even_code():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    weight = torch.zeros(1, 32, dtype=torch.float64)
    weight[0, :7], weight[0, 7:14], weight[0, 31] = middles, -middles, 6.0
    out = dequantize_mxfp4(*quantize_mxfp4(weight), torch.float64)[0]
    assert out[:7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert torch.equal(out[7:14], -out[:7])


def test_zeros_and_signs():
    weight = torch.zeros(1, 64)
    weight[0, 3] = -0.0
    packed, scale = quantize_mxfp4(weight)
    out = dequantize_mxfp4(packed, scale, torch.float32)
    assert torch.equal(bits(out), bits(weight)) and scale.tolist() == [[127, 127]]


def test_the_smallest_and_largest_numbers_stay_in_range():
    weight = torch.zeros(2, 32, dtype=torch.float64)
    weight[0, 0], weight[1, 0] = 2.0**-200, 2.0**127 * 6
    packed, scale = quantize_mxfp4(weight)
    assert scale.flatten().tolist() == [0, 254]
    assert dequantize_mxfp4(packed, scale, torch.float64)[:, 0].tolist() == [0.0, 2.0**127 * 6]


@pytest.mark.parametrize("columns", [31, 33, 16, 1])
def test_a_width_without_whole_blocks_is_refused(columns):
    with pytest.raises(ValueError, match=f"a multiple of 32, got {columns}"):
        quantize_mxfp4(torch.zeros(2, columns))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_refused(value):
    weight = torch.zeros(2, 32)
    weight[1, 7] = value
    with pytest.raises(ValueError, match="no code for inf or NaN"):
        quantize_mxfp4(weight)
