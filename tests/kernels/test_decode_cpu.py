"""What the decode kernel's face checks before C reads raw memory. Its numbers: tests/model/test_native_decode.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanok3.config import K3Config
from nanok3.kernels import decode_cpu, native
from nanok3.kernels.decode_cpu import MemoryLayout, SequenceMemory, refusal
from nanok3.model.decoder import K3
from nanok3.model.mtp import PredictionLayer, layer_config
from nanok3.model.native_decode import NativeDecoder, chain_record

pytestmark = pytest.mark.skipif(not native.available("decode"), reason="no C++ compiler builds the kernel here")

LAYOUT = MemoryLayout(kda_layers=4, mla_layers=1, conv=(3, 3, 64), recurrent=(2, 32, 32), latent=48)


def tensors(pages: int = 3, page: int = 4) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    fixed = [torch.zeros(LAYOUT.conv) for _ in range(4)], [torch.zeros(LAYOUT.recurrent) for _ in range(4)]
    return *fixed, [torch.zeros(pages, page, LAYOUT.latent)]


def test_memory_of_the_wrong_make_is_refused():
    conv, recurrent, latents = tensors()
    wrong = [
        ((conv[:3], recurrent, latents), "conv has 3 tensors; the model has 4 KDA layers"),
        ((conv, [x.bfloat16() for x in recurrent], latents), r"recurrent holds a torch.bfloat16 .* must be float32"),
        ((conv, [x.mT for x in recurrent], latents), "recurrent .* contiguous"),
        (([x[:, :2] for x in conv], recurrent, latents), r"conv holds .* \(3, 2, 64\)"),
        ((conv, recurrent, []), "latents has 0 tensors; the model has 1 MLA layers"),
        ((conv, recurrent, [latents[0][..., :40]]), r"latents .* \(pages, P, 48\)"),
        ((conv, recurrent, [torch.zeros(3, 4, 60)[..., :48]]), r"latents .* contiguous pages"),
        ((conv, recurrent, [latents[0].double()]), "latents holds a torch.float64"),
        ((conv, recurrent, [latents[0][:, :0]]), "latents"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            SequenceMemory(LAYOUT, *arguments)


def test_rows_need_pages_of_the_pool():
    memory = SequenceMemory(LAYOUT, *tensors(), pages=[2], tokens=3)
    memory.prepare(1)
    with pytest.raises(ValueError, match="1 pages of 4 rows have no room for 2 tokens after 3"):
        memory.prepare(2)
    memory.pages = [2, 3]
    with pytest.raises(ValueError, match=r"pages \[2, 3\] are not all in the pool, which has 3"):
        memory.prepare(2)
    memory.pages = [2, 0]
    memory.prepare(2)
    with pytest.raises(ValueError, match="has 0 rows"):
        memory.prepare(0)


def test_a_weight_that_cannot_be_read_is_named():
    assert refusal(torch.zeros(2, 2)) is None
    assert refusal(torch.zeros(2, 2, dtype=torch.bfloat16)) is None
    assert "torch.float16" in str(refusal(torch.zeros(2, dtype=torch.float16)))
    assert "not contiguous" in str(refusal(torch.zeros(2, 3).T))
    assert "on meta" in str(refusal(torch.zeros(2, device="meta")))


def test_calls_that_do_not_add_up_are_refused(unchecked):
    decoder = NativeDecoder(K3(K3Config.tiny(vocab_size=512, **_special())))
    one, other = (_memory(decoder) for _ in range(2))
    ids = torch.tensor([1, 2, 3])
    wrong = [
        ((ids, [one, other], [1, 1]), "ids has 3 rows, the sequences together 2"),
        ((ids, [one, one], [1, 2]), "a sequence is named twice"),
        ((ids, [one], [1, 2]), "1 sequences and 2 row counts"),
        ((ids[:0], [], []), "0 sequences and 0 row counts"),
        ((ids, [one, other], [3, 0]), "a sequence has 0 rows"),
        ((ids[None], [one], [3]), r"ids is torch.int64 of shape \(1, 3\)"),
        ((ids, [one], [3], [3]), r"logits are wanted of rows \[3\]; there are rows 0 to 2"),
        ((ids + 510, [one], [3]), "ids holds 513"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            decoder.step(*arguments)
    assert one.tokens == other.tokens == 0
    assert not any(x.any() for x in (*one.recurrent, *one.conv, *one.latents))
    out = decoder.step(ids, [one, other], [2, 1], wanted=())
    assert out.logits.shape == (0, 512) and (one.tokens, other.tokens) == (2, 1)


def test_chains_that_do_not_add_up_are_refused(unchecked):
    cfg = layer_config(K3Config.tiny(vocab_size=512, **_special()))
    decoder, draft = NativeDecoder(K3(cfg)), PredictionLayer(cfg)
    table = decoder.model.model.embed_tokens.weight
    chain = chain_record(table, draft.eh_proj.weight, draft.enorm.weight, draft.hnorm.weight)
    one, other = (_memory(decoder) for _ in range(2))
    features = torch.zeros(3, cfg.hidden_size)
    wrong = [
        ((features, [1, 2, 3], [one, other], [2, 1], [1, 2]), "2 sequences want .1, 2. guesses"),
        ((features, [1, 2, 3], [one, other], [2, 1], [1, 0]), "2 sequences want .1, 0. guesses"),
        ((features, [1, 2, 3], [one, other], [2, 1], [1]), "2 sequences want .1. guesses"),
        ((features[:2], [1, 2, 3], [one, other], [2, 1], [1, 1]), r"features is torch.float32 of shape \(2, "),
        ((features.double(), [1, 2, 3], [one, other], [2, 1], [1, 1]), "features is torch.float64"),
        ((features.T.contiguous().T, [1, 2, 3], [one, other], [2, 1], [1, 1]), "must be float32 .*, contiguous"),
        ((features, [1, 2, 512], [one, other], [2, 1], [1, 1]), "ids holds 512"),
        ((features, [1, 2, 3], [one, other], [2, 1], [8, 1]), "no room for 9 tokens after 0"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            decoder.guess(chain, *arguments)
    assert one.tokens == other.tokens == 0 and not any(x.any() for x in (*one.latents, *other.latents))
    said = decoder.guess(chain, features, [1, 2, 3], [one, other], [2, 1], [7, 2])
    assert [len(guesses) for guesses in said] == [7, 2] and (one.tokens, other.tokens) == (2, 1)


def _special() -> dict[str, int]:
    return {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "media_placeholder_token_id": 3}


def _memory(decoder: NativeDecoder) -> SequenceMemory:
    layout = decoder.layout
    fixed = [[torch.zeros(shape) for _ in range(layout.kda_layers)] for shape in (layout.conv, layout.recurrent)]
    return decoder.memory(*fixed, [torch.zeros(1, 8, layout.latent) for _ in range(layout.mla_layers)], [0])


def test_the_records_are_those_of_the_source():
    """Sizes are compared when the library is loaded; a field more on one side would show here."""
    assert decode_cpu._library().decode_record_size(0) > 0
