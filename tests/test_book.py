"""The numbers that are published about K3, from `K3Config.k3()` and the model it builds without memory.

Sources: the technical report (R), its public explanation (B), and the sizes of the released files (F).
"""

from __future__ import annotations

import math

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.attn_res import DepthSources
from nanok3.model.cache import KDAState, LatentCache, ModelState
from nanok3.model.decoder import K3
from nanok3.model.kda import KDA, kda, log_decay
from nanok3.model.latent_moe import LatentMoE
from nanok3.model.mla import GatedMLA
from nanok3.model.situ import GatedMLP, situ_glu

MiB = 2**20
CFG = K3Config.k3()


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return K3(CFG)


def size(module):
    """Numbers a module holds, the router's biases among them."""
    return sum(value.numel() for value in module.state_dict().values())


# ------------------------------------------------------------------ layers


def test_93_layers_69_kda_and_24_mla(model):
    """R 2.1: three KDA layers to one MLA layer, and an MLA layer at the end."""
    kinds = [type(layer.self_attn) for layer in model.model.layers]
    assert (len(kinds), kinds.count(KDA), kinds.count(GatedMLA)) == (93, 69, 24)
    cycle = [KDA, KDA, KDA, GatedMLA]
    assert kinds == cycle * 23 + [GatedMLA]


def test_one_dense_layer_and_92_of_experts(model):
    kinds = [type(layer.feed_forward) for layer in model.model.layers]
    assert kinds == [GatedMLP] + [LatentMoE] * 92


def test_eight_blocks_and_nine_sources_over_depth():
    """R 2.2, B: eight blocks of 12 layers, the last one partial; with the running sum nine sources at the end."""
    depth = DepthSources(torch.zeros(1, 1, 1))
    for l in range(93):
        if l % CFG.attn_res_block_size == 0:
            depth.close()
        depth.add(torch.zeros(1, 1, 1))
        depth.add(torch.zeros(1, 1, 1))
    assert len(depth.bank) == 8 and len(depth.sources()) == 9
    assert 93 - 7 * CFG.attn_res_block_size == 9, "layers of the last block"


# ------------------------------------------------------------------ parameters


def test_2_78_trillion_parameters(model):
    """R, F: 2,779,931,834,976 with A_log counted as its 96 heads and the router's biases included."""
    assert size(model) == 2_779_931_834_976
    assert sum(p.numel() for p in model.parameters()) == size(model) - 92 * 896


def test_the_eyes(model):
    """R: a tower of 401 M; the projector is on top of it."""
    assert size(model.vision_tower) == 401_214_464
    assert size(model.mm_projector) == 46_144_512


def test_104_2_billion_parameters_are_active(model):
    """R: 104.2 B a token. Without the eyes, the input table (a look-up) and the experts that were not chosen."""
    expert = 33_030_144
    idle = 92 * (896 - 16) * expert
    active = size(model) - size(model.vision_tower) - size(model.mm_projector) - idle
    table = size(model.model.embed_tokens)
    assert active == 105_364_017_760
    assert active - table == 104_189_612_640
    assert round((active - table) / 1e9, 1) == 104.2


def test_parts_of_the_model(model):
    layers = model.model.layers
    assert size(layers[0].self_attn) == 443_740_384
    assert size(layers[3].self_attn) == 232_196_096
    assert size(model.model.embed_tokens) == size(model.lm_head) == 1_174_405_120
    assert size(layers[5].feed_forward.experts) == 896 * 33_030_144
    assert 92 * 896 * 33_030_144 == 2_722_740_830_208
    assert round(92 * 896 * 33_030_144 / size(model), 4) == 0.9794


def test_one_expert(model):
    """B: gate, up and down, 3 * 3584 * 3072 = 33,030,144 numbers; stored in 17,547,264 bytes."""
    experts = model.model.layers[5].feed_forward.experts
    assert sum(w[0].numel() for w in experts.parameters()) == 3 * 3584 * 3072 == 33_030_144
    assert 33_030_144 * 4 // 8 + 33_030_144 // 32 == 17_547_264
    assert 17_547_264 / 33_030_144 == 0.53125


def test_one_in_56_experts_and_two_shared_ones(model):
    """R 2.3: sparsity 56. The two shared experts are one MLP of twice the width."""
    assert CFG.num_experts / CFG.num_experts_per_token == 56
    shared = model.model.layers[5].feed_forward.shared_experts
    assert shared.gate_proj.weight.shape == (2 * 3072, 7168)


def test_the_tables_are_not_tied(model):
    """B: tying would save one table of about 1.17 B parameters."""
    assert model.model.embed_tokens.weight is not model.lm_head.weight
    assert round(size(model.lm_head) / 1e9, 2) == 1.17


def test_the_arithmetic_of_22_419_gpt_2s(model):
    """B: total parameters in units of 124 M; and 840 of them active. It is arithmetic, not intelligence."""
    assert round(2.78e12 / 124e6) == 22_419
    assert abs(size(model) / 124e6 - 22_419) < 1
    assert round(104.2e9 / 124e6) == 840


# ------------------------------------------------------------------ files


def test_the_release_on_disk(release_tensors, unchecked):
    """F: 497,220 tensors and 1,560,860,324,864 bytes, 1.56 TB."""
    assert len(release_tensors) == 497_220
    assert 92 * 896 * 6 + 92 * 8 + 93 * 6 + 69 * 14 + 24 * 8 + 3 + 5 + 168 == 497_220
    assert sum(spec.nbytes for spec in release_tensors.values()) == 1_560_860_324_864
    packed = [spec for name, spec in release_tensors.items() if ".experts." in name]
    assert len(packed) == 92 * 896 * 6 and sum(spec.nbytes for spec in packed) == 92 * 896 * 17_547_264
    assert sum(name.startswith(("vision_tower.", "mm_projector.")) for name in release_tensors) == 168


# ------------------------------------------------------------------ memory of a sequence


@pytest.fixture(scope="module")
def state():
    return ModelState.empty(CFG, 1, torch.bfloat16, torch.device("meta"))


def test_the_fixed_memory(state):
    """B: 96 * 128 * 128 = 1,572,864 numbers a layer, 3 MiB in bfloat16 and 207 MiB over 69 layers; 414 MiB in the
    float32 that is kept."""
    matrices = [layer.recurrent for layer in state.layers if isinstance(layer, KDAState)]
    assert {m.numel() for m in matrices} == {1_572_864} and 3 * MiB == 2 * 1_572_864
    assert sum(2 * m.numel() for m in matrices) == 207 * MiB
    assert sum(m.nbytes for m in matrices) == 434_110_464 == 414 * MiB
    windows = [layer.conv for layer in state.layers if isinstance(layer, KDAState)]
    assert sum(2 * w.numel() for w in windows) == 15_261_696


def test_the_growing_memory(state):
    """B: 512 + 64 = 576 numbers a token and layer, where expanded keys and values would be 30,720; 27,648 bytes a
    token in bfloat16 over 24 layers."""
    assert CFG.latent_cache_size == 576
    heads = CFG.num_attention_heads
    assert heads * CFG.qk_head_dim + heads * CFG.v_head_dim == 30_720
    latents = [layer for layer in state.clone().layers if isinstance(layer, LatentCache)]
    for layer in latents:
        layer.append(torch.zeros(1, 1, 576, dtype=torch.bfloat16, device="meta"))
    assert sum(layer.nbytes for layer in latents) == 27_648
    assert 24 * 30_720 * 2 == 1_474_560
    assert round(30_720 / 576) == 53


def test_at_a_million_tokens_the_latents_outweigh_the_matrices():
    """27 GiB against 0.4 GiB: constant in length is not small, and small a token is not constant."""
    assert 27_648 * CFG.max_position_embeddings == 27 * 2**30
    assert 434_110_464 // 27_648 == 15_701, "the length at which both are equal"


# ------------------------------------------------------------------ gates


@pytest.mark.parametrize(("alpha", "tokens"), [(0.99, 69), (0.999, 693)])
def test_half_lives(alpha, tokens):
    """B: a retention of 0.99 halves a memory in about 69 tokens, 0.999 in 693 (by the operator, nothing written)."""
    assert round(math.log(0.5) / math.log(alpha)) == tokens
    S = torch.randn(1, 1, 2, 2, dtype=torch.float64)
    zeros = torch.zeros(1, tokens, 1, 2, dtype=torch.float64)
    _, after = kda(zeros, zeros, zeros, zeros + math.log(alpha), zeros[..., 0], S, True)
    torch.testing.assert_close(after / S, torch.full_like(S, 0.5), rtol=0.005, atol=0)


def test_the_least_retention():
    """R 2.1.1: every step keeps more than e^-5 = 0.0067, and 16 steps more than e^-80, inside bfloat16's range."""
    z = torch.tensor([-1e4, 0.0, 1e4], dtype=torch.float64).view(1, 1, 1, 3)
    g = log_decay(z, torch.zeros(1).double(), torch.zeros(3).double(), CFG.gate_lower_bound)
    assert g.flatten().tolist() == [0.0, -2.5, -5.0]
    assert round(math.exp(-5), 4) == 0.0067
    assert math.exp(80) < torch.finfo(torch.bfloat16).max


def test_retention_by_channel():
    """B's example: one scalar halves both rows; a gate per channel keeps one and nearly clears the other."""
    S = torch.tensor([[8.0, 4.0], [6.0, 2.0]], dtype=torch.float64)[None, None]
    zeros = torch.zeros(1, 1, 1, 2, dtype=torch.float64)

    def retained(*alpha):
        g = torch.tensor(alpha, dtype=torch.float64).log().view(1, 1, 1, 2)
        return kda(zeros, zeros, zeros, g, zeros[..., 0], S, True)[1][0, 0]

    torch.testing.assert_close(retained(0.5, 0.5), S[0, 0] / 2)
    torch.testing.assert_close(retained(0.99, 0.01), S[0, 0] * torch.tensor([[0.99], [0.01]]).double())


def test_situ_is_bounded_by_one_hundred():
    """R 2.3.2: 4 * 25."""
    assert CFG.activation_situ_beta * CFG.activation_situ_linear_beta == 100
    large = torch.tensor([1e30])
    assert situ_glu(large, large).item() == 100
