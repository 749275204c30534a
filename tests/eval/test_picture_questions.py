"""Questions on held-out pictures: prompts, greedy answers, what counts as right, and that a picture helps."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import pytest
import torch
from PIL import Image as PILImage

from nanok3.config import K3Config
from nanok3.data.picture_text import media_pad_id
from nanok3.data.pictures.kinds import PictureMix
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, prepare
from nanok3.data.tokenizer import Tokenizer, train_tokenizer
from nanok3.eval import pictures
from nanok3.eval.pictures import (
    Answerer,
    Asked,
    Prompt,
    ask,
    best_constant,
    captions,
    evaluate_pictures,
    questions,
    right,
)
from nanok3.model.decoder import K3
from nanok3.serve.generate import generate
from nanok3.serve.sampler import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")
TEXTS = [
    "\nQuestion: What colour is it?\nAnswer: red",
    "Question: How many shapes are there? two",
    "image 64x56",
    "First:",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("asked")
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"{TEXTS[number % 4]} {number}\n" * 8)
    mix = PictureMix(0.5, 60, ("shapes", "compare"))
    prepare(
        [Source("notes", path=folder / "text")], train_tokenizer(TEXTS * 20, 540), folder / "data", 0.2, pictures=mix
    )
    return Prepared(folder / "data")


@pytest.fixture(scope="module")
def tokenizer(data: Prepared) -> Tokenizer:
    return data.tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> K3:
    torch.manual_seed(0)
    eyes = {"vt_hidden_size": 16, "vt_num_attention_heads": 2, "qkv_hidden_size": 16, "mm_hidden_size": 16}
    cfg = replace(K3Config.vision_tiny(), **eyes, vt_num_hidden_layers=1, vt_intermediate_size=32)
    cfg = replace(cfg.at_depth(2), num_experts=4, num_experts_per_token=2)
    model = K3(cfg.with_vocabulary(tokenizer.vocab_size)).eval()
    for parameter in model.vision_tower.parameters():
        parameter.data.mul_(20)  # so that even an untrained model cares what it sees
    return model


def source(data: Prepared, kind: str):
    return next(s for s in data.sources("validation") if s.name == kind)


@pytest.mark.parametrize("kind", ["shapes", "compare"])
def test_the_blind_prompt_is_the_same_text_without_its_blocks(data: Prepared, tokenizer: Tokenizer, kind: str) -> None:
    held_out, pad = source(data, kind), media_pad_id(tokenizer)
    seen, blind = ask(held_out, 0, "\nQuestion: Which?\nAnswer:", tokenizer)
    assert seen.ids.count(pad) == sum(p.rows for p in seen.pictures) > 0 and len(seen.pictures) == 1 + (
        kind == "compare"
    )
    between = {"shapes": "", "compare": "First: \nSecond: "}[kind]
    assert tokenizer.decode(blind.ids) == f"{between}\nQuestion: Which?\nAnswer:" and not blind.pictures
    assert tokenizer.decode(seen.ids).endswith("\nQuestion: Which?\nAnswer:")


def test_every_field_is_asked_and_no_more_than_allowed(data: Prepared, tokenizer: Tokenizer) -> None:
    asked = questions(data, "shapes", tokenizer, 2)
    assert sorted(a.field for a in asked) == sorted(["colour", "count", "shape", "pixel", "position"] * 2)
    assert [a.exact is None for a in asked] == [a.field not in ("pixel", "position") for a in asked]
    first = data.validation_questions("shapes")[0]
    assert [(a.question, a.answer) for a in asked if a.document == 0] == [(q.text, q.answer) for q in first]


@pytest.mark.parametrize("kind", ["shapes", "compare"])
def test_answers_are_those_of_greedy_generation(
    data: Prepared, tokenizer: Tokenizer, model: K3, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many side by side without a cache, or one by one from a state: the same ids."""
    monkeypatch.setattr(pictures, "_first_answer", lambda text: text)
    monkeypatch.setattr(pictures, "GROUP_TOKENS", 150)
    held_out = source(data, kind)
    prompts = [prompt for d in range(2) for prompt in ask(held_out, d, "\nQuestion: Which?\nAnswer:", tokenizer)]
    said = Answerer(model, held_out, tokenizer)(prompts, [6, 5, 6, 5])
    params = SamplingParams(temperature=0, stop=("\nQ",))
    for prompt, found, most in zip(prompts, said, [6, 5, 6, 5], strict=True):
        one = generate(model, tokenizer, prompt.ids, replace(params, max_tokens=most), images=images(held_out, prompt))
        # A text that ends inside a character is cut off there by one and marked by the other.
        assert found.split("\nQ")[0].rstrip("\ufffd") == one.text.rstrip("\ufffd")


def images(held_out, prompt: Prompt):
    from nanok3.data.images import preprocess_image

    return [preprocess_image(frame) for picture in prompt.pictures for frame in held_out.pictures.frames(picture)]


def test_the_picture_changes_what_is_said(data: Prepared, tokenizer: Tokenizer, model: K3) -> None:
    held_out = source(data, "shapes")
    both = [ask(held_out, d, "\n", tokenizer)[0] for d in range(3)]
    answerer = Answerer(model, held_out, tokenizer)
    with torch.no_grad():
        rows = answerer._read(both, [[], [], []], answerer._look(both))
    assert float((rows[0] - rows[1]).abs().max()) > 1e-4


def asked_for(field: str, answer: str, exact: list[float] | None = None) -> Asked:
    return Asked(field, "?", answer, 0, (60, 40), Prompt([1]), Prompt([1]), exact)


@pytest.mark.parametrize(
    ("field", "said", "answer", "exact", "verdict"),
    [
        ("colour", "red", "red", None, True),
        ("colour", "Red", "red", None, False),
        ("word of 4", "t e a", "t e a m", None, False),
        ("position", "0.5, 0.6", "0.4, 0.7", [0.42, 0.69], True),
        ("position", "0.5, 0.6", "0.4, 0.6", [0.39, 0.6], False),
        ("position", "0.5, 0.6", "0.5, 0.7", [0.5, 0.71], False),
        ("position", "0.5", "0.5, 0.6", [0.5, 0.6], False),
        ("position", "0.5.0, 0.6", "0.5, 0.6", [0.5, 0.6], False),
        ("pixel", "30, 12", "35, 10", [36, 8], True),
        ("pixel", "30, 12", "35, 10", [36.1, 12], False),
        ("pixel", "30, 12", "30, 15", [30, 16.1], False),
    ],
)
def test_what_is_right(field: str, said: str, answer: str, exact: list[float] | None, verdict: bool) -> None:
    assert right(asked_for(field, answer, exact), said) is verdict


def test_chance_is_the_best_single_answer() -> None:
    assert best_constant([asked_for("colour", answer) for answer in ("red", "blue", "red", "pink")]) == 0.5
    places = [asked_for("position", f"{x}, {x}", [x, x]) for x in (0.1, 0.2, 0.3, 0.9)]
    assert best_constant(places) == 0.75


def test_the_whole_measurement(data: Prepared, model: K3) -> None:
    found = evaluate_pictures(model, data, most=3, examples=1)
    fields = {(f["kind"], f["field"]): f for f in found["fields"]}
    assert ("shapes", "colour") in fields and ("compare", "total") in fields
    assert all(1 <= f["count"] <= 3 and 0 <= f["right"] <= 1 and 0 < f["chance"] <= 1 for f in fields.values())
    assert {e["kind"] for e in found["examples"]} == {"shapes", "compare"}
    example = found["examples"][0]
    picture = PILImage.open(io.BytesIO(base64.b64decode(example["png"])))
    stored = source(data, "shapes").pictures_of(0)[0]
    assert picture.height >= 28 and stored.height >= 28 and not example["caption"].startswith("Question")


def test_captions_are_what_is_said_instead_of_a_question(data: Prepared, tokenizer: Tokenizer, model: K3) -> None:
    found = captions(model, source(data, "shapes"), tokenizer, [0, 1])
    assert [c.kind for c in found] == ["shapes", "shapes"] and all(c.true for c in found)


def test_a_model_without_eyes_and_data_without_pictures_are_refused(data: Prepared, model: K3) -> None:
    with pytest.raises(ValueError, match=r"pictures: this model has no vision tower"):
        evaluate_pictures(K3(K3Config.tiny().with_vocabulary(540)), data)
    with pytest.raises(ValueError, match=r"pictures: .* has no held-out pictures"):
        evaluate_pictures(model, data, kinds=["words"])
