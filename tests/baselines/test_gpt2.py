"""GPT-2 against its formula written out, and its published numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanok3.baselines.gpt2 import GPT2, GPT2Config, parameters

CFG = GPT2Config(vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=9)


def by_hand(w: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits of one document, with loops over heads and positions."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embed_tokens.weight"][ids] + w["embed_positions.weight"][: len(ids)]
    for l in range(2):
        q, k, v = linear(norm(x, f"layers.{l}.input_norm"), f"layers.{l}.mixer.qkv_proj").split(12, dim=1)
        read = torch.zeros_like(x)
        for h in (slice(0, 6), slice(6, 12)):
            for t in range(len(ids)):
                scores = torch.stack([q[t, h] @ k[s, h] / math.sqrt(6) for s in range(t + 1)])
                read[t, h] = scores.softmax(0) @ v[: t + 1, h]
        x = x + linear(read, f"layers.{l}.mixer.o_proj")
        u = linear(norm(x, f"layers.{l}.mlp_norm"), f"layers.{l}.mlp.up_proj")
        u = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + linear(u, f"layers.{l}.mlp.down_proj")
    return norm(x, "norm") @ w["embed_tokens.weight"].T


def test_it_is_the_formula() -> None:
    torch.manual_seed(0)
    model = GPT2(CFG).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids = [3, 1, 4, 1, 5, 9, 2]
    logits = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, by_hand(dict(model.named_parameters()), ids), rtol=1e-10, atol=1e-10)


def test_the_published_sizes() -> None:
    small = GPT2Config(vocab_size=50257, hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
    assert parameters(small) == 124_439_808
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT2(small).parameters()) == 124_439_808


def test_how_it_starts() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=2000, hidden_size=64, num_hidden_layers=8, num_attention_heads=1))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" not in name:
            written = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / 4 if written else 0.01 if "positions" in name else 0.02
            assert float(p.detach().std()) == pytest.approx(std, rel=0.05), name


def test_positions_run_out() -> None:
    model = GPT2(CFG)
    model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="10 tokens; GPT-2 knows 9 positions"):
        model(torch.zeros(1, 10, dtype=torch.int64))
    model(torch.zeros(1, 10, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4, 10]))
