"""What the text of picture documents weighs: the marks, the packer's weights, the loss, the gradients."""

from __future__ import annotations

from random import Random

import pytest
import torch

from nanok3.data.loader import MixtureLoader
from nanok3.data.packing import Batch
from nanok3.data.picture_text import encode_document
from nanok3.data.pictures.kinds import open_kind, picture_documents
from nanok3.data.prepared import Prepared
from nanok3.train.loss import IGNORE, cross_entropy, sum_of_weights, weighted_cross_entropy
from nanok3.train.settings import TrainSettings
from nanok3.train.sight import Sight
from tests.train.test_sight import folder, seeing  # noqa: F401 the folder is a fixture

pytestmark = pytest.mark.usefixtures("unchecked")
W = 0.25


def batches(data: Prepared, weight: float) -> Batch:
    return next(MixtureLoader(data.sources(), data.weights(), 6, 256, 0, picture_text_weight=weight))


@pytest.mark.parametrize("kind", ["shapes", "places", "compare", "plots", "tables", "motion", "words"])
def test_what_is_marked_is_what_the_picture_tells(kind, folder):  # noqa: F811
    tokenizer = Prepared(folder).tokenizer()
    for document in picture_documents(kind, open_kind(kind, ["stock"]), 30, 1):
        text = document.parts[-1]
        marked = [text[begin:end] for begin, end in document.told]
        assert marked and all(part == part.strip() for part in marked)
        if "Question:" in text:
            answers = [line.removeprefix("Answer: ") for line in text.split("\n") if line.startswith("Answer: ")]
            if kind != "tables":
                assert marked == answers
        ids, placed, told = encode_document(document, tokenizer)
        assert len(told) == len(marked) and all(begin >= placed[-1].end for begin, _ in told)
        for (begin, end), part in zip(told, marked, strict=True):
            said = tokenizer.decode(ids[begin:end])
            assert part in said and len(said) <= len(part) + 3
            assert part not in tokenizer.decode(ids[begin + 1 : end])
            assert part not in tokenizer.decode(ids[begin : end - 1])


def test_a_caption_marks_words_and_nothing_else():
    random = Random(3)
    captions = [d for d in picture_documents("shapes", open_kind("shapes"), 60, 2) if "Question" not in d.text]
    for document in captions:
        marked = [document.parts[-1][begin:end].lower() for begin, end in document.told]
        assert len(marked) == 3 and " ".join(marked) in document.text.lower()
    assert random is not None and captions


def test_the_packer_weighs_targets(folder):  # noqa: F811
    data = Prepared(folder)
    plain, weighed = batches(data, 1.0), batches(data, W)
    assert plain.weights is None and torch.equal(plain.targets, weighed.targets)
    tokenizer, sources = data.tokenizer(), {source.name: source for source in data.sources()}
    full = 0
    for segment, begin, end in zip(weighed.ids, weighed.cu_seqlens, weighed.cu_seqlens[1:], strict=False):
        weights, targets = (each.view(-1)[begin:end] for each in (weighed.weights, weighed.targets))
        if segment is None or segment.source == "stories":
            assert (weights == 1).all()
            continue
        assert ((weights == 1) | (weights == W)).all()
        told = sources[segment.source].told_of(segment.document)
        expected = [i for a, b in told for i in sources[segment.source].tokens(segment.document, a, b).tolist()]
        assert targets[(weights == 1) & (targets != IGNORE)].tolist() == expected
        assert targets[-1] == tokenizer.eos_id and weights[-1] == W
        full += len(expected)
    assert full > 20
    assert weighed.to(torch.device("cpu")).weights is not None


def test_weights_of_one_are_the_plain_loss_to_the_bit():
    torch.manual_seed(0)
    hidden, matrix = torch.randn(3, 17, 12, requires_grad=True), torch.randn(37, 12, requires_grad=True)
    targets = torch.randint(0, 37, (3, 17)).masked_fill(torch.rand(3, 17) < 0.3, IGNORE)
    want, count = cross_entropy(hidden, matrix, targets, chunk=7)
    loss, plain = weighted_cross_entropy(hidden, matrix, targets, torch.ones(3, 17), chunk=7)
    assert torch.equal(loss, want) and torch.equal(plain, want) and not plain.requires_grad
    assert sum_of_weights(targets, torch.ones(3, 17)) == sum_of_weights(targets, None) == count
    for a, b in zip(torch.autograd.grad(loss, (hidden, matrix)), torch.autograd.grad(want, (hidden, matrix))):
        assert torch.equal(a, b)


def test_gradients_are_those_of_the_weighted_sum():
    torch.manual_seed(1)
    hidden, matrix = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (9, 6))
    targets, weights = torch.randint(0, 6, (9,)), torch.rand(9, dtype=torch.float64)
    targets[4] = IGNORE
    loss = weighted_cross_entropy(hidden, matrix, targets, weights, chunk=2)[0]
    each = torch.nn.functional.cross_entropy(hidden @ matrix.T, targets, reduction="none", ignore_index=IGNORE)
    torch.testing.assert_close(loss, (each * weights).sum())
    wanted = torch.autograd.grad((each * weights).sum(), (hidden, matrix))
    for a, b in zip(torch.autograd.grad(loss, (hidden, matrix)), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(lambda h, m: weighted_cross_entropy(h, m, targets, weights, 2)[0], (hidden, matrix))


def test_the_texts_gradients_are_the_same(folder):  # noqa: F811
    """Of the hidden states, before the sum of weights divides them."""
    data = Prepared(folder)
    model = seeing(data.manifest["vocab_size"])
    found = []
    for batch in (batches(data, 1.0), batches(data, W)):
        sight = Sight(model)
        sight.look([batch])
        hidden = sight.hidden(batch).detach().requires_grad_()
        weights = None if batch.weights is None else batch.weights.view(1, -1)
        weighted_cross_entropy(hidden, model.lm_head.weight, batch.targets.view(1, -1), weights)[0].backward()
        found.append(hidden.grad[0])
    weights = batch.weights.view(-1)
    assert torch.equal(found[0][weights == 1], found[1][weights == 1])
    torch.testing.assert_close(found[0][weights != 1] * W, found[1][weights != 1])


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.5, float("nan")])
def test_a_weight_out_of_range(weight):
    with pytest.raises(ValueError, match=r"picture_text_weight is .*; it must be above 0, at most 1"):
        TrainSettings(steps=1, picture_text_weight=weight)
