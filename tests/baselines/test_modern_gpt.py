"""The modern GPT: rotations depend on distances alone, and its size has no surprises."""

from __future__ import annotations

import pytest
import torch

from nanok3.baselines.frame import BaselineConfig
from nanok3.baselines.modern_gpt import ModernGPT, rotate


def test_rotation_is_by_distance() -> None:
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        return float((rotate(q, torch.tensor([i])) * rotate(k, torch.tensor([j]))).sum())

    assert product(5, 3) == pytest.approx(product(105, 103), rel=1e-5)
    assert abs(product(5, 3) - product(5, 4)) > 1e-3
    torch.testing.assert_close(rotate(q, torch.tensor([7])).norm(), q.norm())
    torch.testing.assert_close(rotate(q, torch.tensor([0])), q)


def test_first_pair_turns_by_one_radian_a_token() -> None:
    x = torch.zeros(1, 3, 1, 4, dtype=torch.float64)
    x[..., 0] = 1.0
    angle = torch.arange(3.0, dtype=torch.float64)
    turned = rotate(x, torch.arange(3))[0, :, 0]
    torch.testing.assert_close(turned[:, 0], angle.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[:, 2], angle.sin(), rtol=0, atol=1e-6)


def test_layers_begin_as_the_identity() -> None:
    torch.manual_seed(0)
    model = ModernGPT(BaselineConfig(vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2))
    ids = torch.randint(0, 40, (1, 12))
    torch.testing.assert_close(model.hidden_states(ids), model.norm(model.embed_tokens(ids)))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_heads_of_odd_width_are_refused() -> None:
    with pytest.raises(ValueError, match="is 5; rotary positions need it even"):
        ModernGPT(BaselineConfig(vocab_size=40, hidden_size=15, num_hidden_layers=1, num_attention_heads=3))
