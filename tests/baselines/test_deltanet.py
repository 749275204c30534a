"""The delta rule: a key that comes again replaces what stood there; the gate lets memory fade."""

from __future__ import annotations

import torch

from nanok3.baselines.deltanet import DeltaNet, DeltaNetConfig, DeltaRule
from nanok3.baselines.frame import row_of
from nanok3.model.kda import l2_normalize, log_decay

SIZE = {"vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}


def by_hand(mixer: DeltaRule, x: torch.Tensor) -> torch.Tensor:
    """One row, token by token, with the three lines of the docstring."""
    q, k, v = (
        conv(proj(x)).unflatten(-1, (3, 4))[0]
        for proj, conv in (
            (mixer.q_proj, mixer.q_conv1d),
            (mixer.k_proj, mixer.k_conv1d),
            (mixer.v_proj, mixer.v_conv1d),
        )
    )
    q, k, b = l2_normalize(q), l2_normalize(k), mixer.b_proj(x)[0].sigmoid()
    fade = torch.ones_like(b)
    if mixer.cfg.gated:
        fade = log_decay(mixer.a_proj(x).unsqueeze(-1), mixer.A_log, mixer.dt_bias, -5.0)[0, ..., 0].exp()
    outputs = []
    S = x.new_zeros(3, 4, 4)
    for t in range(x.shape[1]):
        S = fade[t, :, None, None] * S
        error = v[t] - torch.einsum("hkv,hk->hv", S, k[t])
        S = S + b[t, :, None, None] * k[t].unsqueeze(2) * error.unsqueeze(1)
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) / 2)  # the operator's scale, 4^-1/2
    o = torch.stack(outputs)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.o_norm.weight
    return o.flatten(1) @ mixer.o_proj.weight.T


def test_it_is_the_delta_rule() -> None:
    for gated in (False, True):
        torch.manual_seed(0)
        model = DeltaNet(DeltaNetConfig(**SIZE, gated=gated)).double()
        mixer = model.layers[0].mixer
        for p in mixer.parameters():
            torch.nn.init.normal_(p, std=0.5)
        x = torch.randn(1, 21, 12, dtype=torch.float64)
        row = row_of(torch.zeros(1, 21, dtype=torch.int64), None)
        torch.testing.assert_close(mixer(x, row)[0], by_hand(mixer, x))


def test_only_the_gated_one_fades() -> None:
    x, k = torch.randn(1, 5, 12), torch.randn(1, 5, 3, 4)
    plain = DeltaNet(DeltaNetConfig(**SIZE)).layers[0].mixer
    gated = DeltaNet(DeltaNetConfig(**SIZE, gated=True)).layers[0].mixer
    assert not plain.decay(x, k).any()
    g = gated.decay(x, k)
    assert g.shape == k.shape and bool((g < 0).all()) and bool((g > -5).all())
    assert bool((g == g[..., :1]).all())
