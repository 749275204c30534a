"""What K3 is in llama.cpp's terms, from configs alone: the release fits, and no weight is lost."""

from __future__ import annotations

import math

import pytest
import torch

from nanok3.config import K3Config
from nanok3.quant.llama_cpp import FILE_TYPES, Plan, hyperparameters, refusals


def unread(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} is read before its turn")


def plan(cfg: K3Config, dtype: str) -> Plan:
    return Plan(cfg, unread, True, FILE_TYPES[dtype])


def test_the_release_fits() -> None:
    cfg = K3Config.k3()
    assert refusals(cfg, "mxfp4") == []
    keys = hyperparameters(cfg, "mxfp4", "K3")
    assert keys["kimi-k3.attention.head_count_kv"].count(1) == 24 and keys["kimi-k3.expert_count"] == 896


def test_no_weight_of_the_release_is_lost() -> None:
    """The text part has 2,779,484,227,936 weights; a pair of vectors a depth read (two a layer and the last) became
    one."""
    cfg = K3Config.k3()
    tensors = plan(cfg, "mxfp4").tensors()
    text = 2_779_931_834_976 - 401_214_464 - 46_144_512
    assert sum(math.prod(t.shape) for t in tensors) == text - (2 * 93 + 1) * 7168
    experts = sum(t.nbytes for t in tensors if "_exps" in t.name)
    assert experts == 92 * 896 * 3 * 3584 * 3072 * 17 // 32
    assert len({t.name for t in tensors}) == len(tensors) and max(len(t.name) for t in tensors) < 64


@pytest.mark.parametrize("dtype", FILE_TYPES)
def test_switches_of_the_config_choose_the_tensors(dtype: str) -> None:
    def names(**changes: object) -> set[str]:
        return {t.name for t in plan(K3Config.tiny(**changes), dtype).tensors()}

    every = names()
    assert every - names(q_lora_rank=None) == {
        f"blk.{l}.attn_q_{x}.weight" for l in (3, 4) for x in ("a", "b", "a_norm")
    }
    assert every - names(mla_use_output_gate=False) == {f"blk.{l}.attn_gate.weight" for l in (3, 4)}
    assert every - names(latent_moe_use_norm=False) == {f"blk.{l}.ffn_routed_norm.weight" for l in range(1, 5)}
    assert not [name for name in names(num_shared_experts=0) if "shexp" in name]
    assert "blk.1.ffn_gate.weight" in names(first_k_dense_replace=2)


def test_an_unset_cap_is_written_as_none() -> None:
    keys = hyperparameters(K3Config.tiny(activation_situ_beta=None, activation_situ_linear_beta=None), "f32", "x")
    assert keys["kimi-k3.activation.situ_beta"] == 1 and keys["kimi-k3.activation.situ_linear_beta"] == 0
    assert "kimi-k3.kda.gate_lower_bound" not in hyperparameters(K3Config.tiny(gate_lower_bound=None), "f32", "x")
