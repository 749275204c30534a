"""The official config.json, as a document: what surrounds the numbers, and the release's own numbers.

Facts of moonshotai/Kimi-K3, revision 9f62e4e, without its serialization leftovers. `config.py` fills these documents in
and reads them; nothing here computes.
"""

from __future__ import annotations

from typing import Any

MXFP4_BLOCK = 32
"""Elements that share one scale, along the input dimension of an expert's matrix (OCP MX formats)."""


def mxfp4_quantization() -> dict[str, Any]:
    """The release's quantization section: routed experts in MXFP4, weight-only as published."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP4_BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
        "zp_dtype": None,
    }
    group = {
        "targets": ["Linear"],
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    kept = [r".*self_attn.*", r".*shared_experts.*", r".*mlp\.(gate|up|gate_up|down)_proj.*", r".*lm_head.*"]
    kept += [r".*vision_tower.*", r".*mm_projector.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [f"re:{pattern}" for pattern in kept],
    }


def template(model_type: str) -> dict[str, Any]:
    """The fixed fields of an official file, for a config that was not read from one."""
    modeling = "modeling_kimi_linear.KimiLinear"
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
            "AutoModel": f"{modeling}Model",
            "AutoModelForCausalLM": f"{modeling}ForCausalLM",
        },
        "model_type": "kimi_linear",
        "linear_attn_config": {},
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "use_cache": True,
    }
    if model_type == "kimi_linear":
        return text | {"auto_map": {}}
    whole = "modeling_kimi_k3.KimiK3ForConditionalGeneration"
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": whole,
            "AutoModelForCausalLM": whole,
        },
        "model_type": "kimi_k3",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "text_config": text,
    }


def release() -> dict[str, Any]:
    """config.json of moonshotai/Kimi-K3, revision 9f62e4e, without its serialization leftovers."""
    document = template("kimi_k3")
    ids = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
    full = [*range(4, 93, 4), 93]
    document.update(ids, dtype="bfloat16", media_placeholder_token_id=163605, tie_word_embeddings=False)
    document["text_config"].update(
        ids,
        dtype="bfloat16",
        vocab_size=163840,
        hidden_size=7168,
        num_hidden_layers=93,
        num_attention_heads=96,
        num_key_value_heads=96,
        intermediate_size=33792,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        rms_norm_eps=1e-05,
        max_position_embeddings=1048576,
        tie_word_embeddings=False,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_use_nope=True,
        mla_use_output_gate=True,
        attn_res_block_size=12,
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        latent_moe_use_norm=True,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        moe_router_activation_func="sigmoid",
        moe_renormalize=True,
        routed_scaling_factor=1.0,
        num_expert_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
        initializer_range=0.02,
        quantization_config=mxfp4_quantization(),
        linear_attn_config={
            "full_attn_layers": full,
            "kda_layers": [l for l in range(1, 94) if l not in full],
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
    )
    document["vision_config"] = {
        "patch_size": 14,
        "vt_hidden_size": 1024,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 12,
        "qkv_hidden_size": 1536,
        "vt_intermediate_size": 4096,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "norm_type": "rmsnorm",
        "mlp_type": "mlp2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": 1024,
        "text_hidden_size": 7168,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "_attn_implementation": "flash_attention_2",
    }
    return document
