"""Text and pictures through the whole model, against the official code's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nanok3

FIXTURES = Path(__file__).parent.parent / "fixtures" / "vision"
CASES = ["one_image", "image_first", "two_images", "adjacent", "video_t4", "single_token_image"]


@pytest.fixture(scope="module")
def model():
    return nanok3.load(FIXTURES / "model", dtype=torch.float64)


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "multimodal.safetensors")


def media(expected, case, dtype=torch.float64):
    return {
        "pixel_values": expected[f"{case}.pixel_values"].to(dtype),
        "grid_thw": expected[f"{case}.grid_thw"],
    }


def largest(a, b):
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


@torch.no_grad()
@pytest.mark.parametrize("written", ["single", "expanded"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_official_ones(model, expected, case, written):
    ids = expected[f"{case}.input_ids_{written}"][None]
    out = model(ids, **media(expected, case))
    assert largest(out.logits[0], expected[f"{case}.logits"]) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("written", ["single", "expanded"])
@pytest.mark.parametrize("case", CASES)
def test_reading_on_from_a_state_equals_the_official_cache(model, expected, case, written):
    state = model.new_state(1)
    model(expected[f"{case}.input_ids_{written}"][None], **media(expected, case), state=state)
    assert state.tokens == len(expected[f"{case}.logits"])
    for token, logits in zip(expected[f"{case}.continue_ids"], expected[f"{case}.continue_logits"], strict=True):
        out = model(token.view(1, 1), state=state)
        assert largest(out.logits[0, 0], logits) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_float32_stays_within_5e3(expected, case):
    model = nanok3.load(FIXTURES / "model", dtype=torch.float32)
    out = model(expected[f"{case}.input_ids_expanded"][None], **media(expected, case, torch.float32))
    assert out.logits.dtype == torch.float32
    assert largest(out.logits[0], expected[f"{case}.logits"]) < 5e-3


@torch.no_grad()
def test_a_picture_may_come_after_text_that_is_already_in_the_state(model, expected):
    ids = expected["one_image.input_ids_expanded"][None]
    state = model.new_state(1)
    first = model(ids[:, :2], state=state).logits
    rest = model(ids[:, 2:], **media(expected, "one_image"), state=state).logits
    assert largest(torch.cat([first, rest], dim=1)[0], expected["one_image.logits"]) < 1e-9


@torch.no_grad()
def test_packed_documents_with_pictures_equal_themselves_alone(model, expected):
    cases = ["one_image", "adjacent", "single_token_image"]
    ids = [expected[f"{case}.input_ids_expanded"] for case in cases]
    bounds = torch.tensor([0, *[len(document) for document in ids]]).cumsum(0)
    pixel_values = torch.cat([expected[f"{case}.pixel_values"].double() for case in cases])
    grid_thw = torch.cat([expected[f"{case}.grid_thw"] for case in cases])
    packed = torch.cat(ids)[None]
    out = model(packed, pixel_values=pixel_values, grid_thw=grid_thw, cu_seqlens=bounds)
    assert largest(out.logits[0], torch.cat([expected[f"{case}.logits"] for case in cases])) < 1e-9


@torch.no_grad()
def test_the_picture_matters_and_so_does_the_order_of_two(model, expected):
    ids = expected["two_images.input_ids_expanded"][None]
    seen = media(expected, "two_images")
    blank = model(ids, pixel_values=torch.zeros_like(seen["pixel_values"]), grid_thw=seen["grid_thw"])
    assert largest(blank.logits[0], expected["two_images.logits"]) > 1e-2
    patches = seen["pixel_values"].split(seen["grid_thw"].prod(dim=1).tolist())
    single = expected["two_images.input_ids_single"][None]
    swapped = model(single, pixel_values=torch.cat(patches[::-1]), grid_thw=seen["grid_thw"].flip(0))
    assert largest(swapped.logits[0], expected["two_images.logits"]) > 1e-2


def test_a_loss_on_text_teaches_the_tower(expected):
    model = nanok3.load(FIXTURES / "model", dtype=torch.float32)
    ids = expected["two_images.input_ids_expanded"][None]
    logits = model(ids, **media(expected, "two_images", torch.float32)).logits
    logits[0, -1].logsumexp(0).backward()
    for part in (model.vision_tower, model.mm_projector):
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_a_preprocessed_image_fits_the_model(model):
    picture = pytest.importorskip("PIL.Image").new("RGB", (50, 30), (200, 30, 60))
    image = nanok3.preprocess_image(picture)
    pad = model.cfg.media_placeholder_token_id
    with torch.no_grad():
        out = model(torch.tensor([[1, pad, 2]]), pixel_values=image.pixel_values, grid_thw=image.grid_thw)
    assert out.logits.shape[:2] == (1, 2 + image.tokens)


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 245, 245, 2], [245, 245, 245]])
def test_pictures_without_their_placeholders_are_refused(model, expected, ids):
    with pytest.raises(ValueError, match=r"placeholders \(id 245\) for 1 media items with 6 feature rows"):
        model(torch.tensor([ids]), **media(expected, "one_image"))


def test_placeholders_without_pictures_are_refused(model):
    """They would be read as words of the text."""
    with pytest.raises(ValueError, match=r"holds 2 placeholders \(id 245\) and no pictures were given"):
        model(torch.tensor([[1, 245, 3], [245, 5, 6]]))
