"""The config: official files come back whole, the family keeps its proportions, and nothing impossible is built."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nanok3.config import K3Config, with_expert_format
from nanok3.model.decoder import K3
from nanok3.official import mxfp4_quantization

GOLDEN = ["a_k3_13l", "b_k3_7l", "b_k3_7l_sharded", "c1_k3_1l_kda", "c2_k3_1l_mla", "d_kimi_linear_6l"]
GOLDEN += ["e_k3_5l_realheads", "f_k3_4l_small"]
PRESETS = [K3Config.tiny, K3Config.small, K3Config.base, K3Config.vision_tiny, K3Config.vision_small, K3Config.k3]

IDS = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
MLA_LAYERS = [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 93]
LINEAR_ATTENTION = {
    "full_attn_layers": MLA_LAYERS,
    "gate_lower_bound": -5.0,
    "head_dim": 128,
    "kda_layers": [l for l in range(1, 92) if l % 4],
    "num_heads": 96,
    "short_conv_kernel_size": 4,
    "use_full_rank_gate": True,
}
# config.json of the release, written out from architecture 1.1-1.6 (not from the package)
TEXT = IDS | {
    "_name_or_path": "",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "architectures": ["KimiLinearForCausalLM"],
    "attn_res_block_size": 12,
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
        "AutoModel": "modeling_kimi_linear.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
    },
    "bad_words_ids": None,
    "diversity_penalty": 0.0,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": 7168,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "intermediate_size": 33792,
    "kv_lora_rank": 512,
    "latent_moe_use_norm": True,
    "linear_attn_config": LINEAR_ATTENTION,
    "max_length": 20,
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 3072,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 96,
    "num_expert_group": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "num_key_value_heads": 96,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "pruned_heads": {},
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
    "rms_norm_eps": 1e-05,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "temperature": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "4.56.2",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
VISION = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 1024,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "qkv_hidden_size": 1536,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
}
RELEASE = IDS | {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiK3Config",
        "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    },
    "dtype": "bfloat16",
    "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k3",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "vision_config": VISION,
}
# what the release's serialization left behind, and K3Config.k3() does without
LEFTOVERS = ["_name_or_path", "bad_words_ids", "diversity_penalty", "id2label", "max_length", "pruned_heads"]
LEFTOVERS += ["temperature", "transformers_version"]


def read(document, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return K3Config.from_json(path)


def build(cfg):
    with torch.device("meta"):
        return K3(cfg)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("name", GOLDEN)
def test_an_official_file_comes_back_as_it_was(golden, name, tmp_path):
    text = (golden(name).folder / "config.json").read_text()
    cfg = K3Config.from_json(golden(name).folder)
    written = cfg.to_json(tmp_path / "config.json")
    assert json.loads(written) == json.loads(text)
    assert [*json.loads(written)] == [*json.loads(text)], "the order of the keys"
    assert (tmp_path / "config.json").read_text() == written
    assert read(written, tmp_path) == cfg


def test_the_release_is_read_and_written_without_loss(tmp_path):
    cfg = read(RELEASE, tmp_path)
    assert cfg == K3Config.k3()
    assert cfg.to_dict() == RELEASE


def test_k3_writes_every_field_of_the_release_but_its_leftovers():
    expected = copy.deepcopy(RELEASE)
    for name in LEFTOVERS:
        del expected["text_config"][name]
    assert K3Config.k3().to_dict() == expected


@pytest.mark.parametrize("name", ["a_k3_13l", "d_kimi_linear_6l"])
def test_unknown_fields_survive_in_every_section(golden, name, tmp_path):
    document = json.loads((golden(name).folder / "config.json").read_text())
    extra = {"of": [1, {"a": None}], "ours": "not", "größe": "日本"}

    def plant(node):
        for child in list(node.values()):
            if isinstance(child, dict):
                plant(child)
        node["x_unknown"] = extra

    plant(document)
    cfg = read(document, tmp_path)
    assert cfg == golden(name).config
    assert read(cfg.to_json(), tmp_path).to_dict() == document
    changed = replace(cfg, rms_norm_eps=3e-5).to_dict()
    (changed["text_config"] if name[0] == "a" else changed)["rms_norm_eps"] = cfg.rms_norm_eps
    assert changed == document, "one field changed, no other"


def test_a_changed_id_is_changed_in_both_places():
    document = replace(K3Config.k3(), eos_token_id=7).to_dict()
    assert document["eos_token_id"] == document["text_config"]["eos_token_id"] == 7


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_and_changes_survive_a_file(preset, tmp_path):
    for cfg in (preset(), preset(qk_norm_eps=1e-5, attn_res_full=True, hidden_act="silu", q_lora_rank=None)):
        cfg.to_json(tmp_path / "config.json")
        assert K3Config.from_json(tmp_path) == cfg


def test_our_own_fields_are_written_only_where_they_differ():
    text = K3Config.tiny().to_dict()["text_config"]
    assert "qk_norm_eps" not in text and "attn_res_full" not in text
    assert K3Config.tiny(qk_norm_eps=1e-5).to_dict()["text_config"]["qk_norm_eps"] == 1e-5


def test_a_model_without_eyes_loses_the_section(golden, tmp_path):
    cfg = golden("a_k3_13l").config
    blind = replace(cfg, **{f.name: None for f in fields(cfg) if f.name in VISION})
    assert not blind.has_vision and "vision_config" not in blind.to_dict()
    assert read(blind.to_json(), tmp_path) == blind
    assert cfg.has_vision and "vision_config" in cfg.to_dict()


def test_writing_leaves_one_file_and_replaces_it_whole(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    K3Config.tiny().to_json(path)
    before = path.read_text()
    K3Config.small().to_json(path)
    assert K3Config.from_json(path) == K3Config.small() and os.listdir(tmp_path) == ["config.json"]
    path.write_text(before)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        K3Config.small().to_json(path)
    assert path.read_text() == before


def test_absent_fields_mean_the_official_class_defaults(tmp_path):
    """Architecture 1.4: a field that is dropped takes the class default, not the release's value."""
    optional = ["activation_situ_beta", "activation_situ_linear_beta", "q_lora_rank", "mla_use_output_gate"]
    optional += ["num_shared_experts", "routed_expert_hidden_size", "latent_moe_use_norm", "first_k_dense_replace"]
    optional += ["routed_scaling_factor", "moe_renormalize", "max_position_embeddings", "moe_layer_freq"]
    optional += ["moe_router_activation_func", "num_expert_group", "topk_group", "initializer_range"]
    optional += ["num_nextn_predict_layers", "tie_word_embeddings", "quantization_config"]
    document = copy.deepcopy(RELEASE)
    for name in optional:
        del document["text_config"][name]
    for name in ("gate_lower_bound", "use_full_rank_gate"):
        del document["text_config"]["linear_attn_config"][name]
    del document["vision_config"], document["media_placeholder_token_id"]
    cfg = read(document, tmp_path)
    assert (cfg.activation_situ_beta, cfg.activation_situ_linear_beta, cfg.q_lora_rank) == (None, None, None)
    assert (cfg.mla_use_output_gate, cfg.latent_moe_use_norm, cfg.use_full_rank_gate) == (False, False, False)
    assert (cfg.num_shared_experts, cfg.first_k_dense_replace, cfg.routed_expert_hidden_size) == (0, 0, None)
    assert (cfg.routed_scaling_factor, cfg.moe_renormalize, cfg.gate_lower_bound) == (1.0, True, None)
    assert (cfg.expert_format, cfg.has_vision) == (None, False)
    assert (cfg.max_position_embeddings, cfg.initializer_range, cfg.moe_layer_freq) == (4096, 0.02, 1)
    assert cfg.to_dict() == document, "and they stay absent"


def test_a_flat_file_has_everything_at_the_top(golden):
    cfg = golden("d_kimi_linear_6l").config
    assert (cfg.model_type, cfg.text_prefix, cfg.attn_res_block_size) == ("kimi_linear", "", None)
    assert (cfg.routed_scaling_factor, cfg.hidden_act, cfg.gate_lower_bound) == (2.446, "silu", None)
    assert cfg.kinds == ("kda", "kda", "kda", "mla", "kda", "mla")


REQUIRED = """
vocab_size hidden_size num_hidden_layers intermediate_size hidden_act rms_norm_eps num_attention_heads
num_key_value_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts num_experts_per_token
moe_intermediate_size linear_attn_config.kda_layers linear_attn_config.full_attn_layers linear_attn_config.num_heads
linear_attn_config.head_dim linear_attn_config.short_conv_kernel_size
""".split()


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named_with_its_file(field, tmp_path):
    document = copy.deepcopy(RELEASE)
    node = document["text_config"]
    *path, leaf = field.split(".")
    for step in path:
        node = node[step]
    del node[leaf]
    with pytest.raises(ValueError) as error:
        read(document, tmp_path)
    assert str(error.value) == f"{tmp_path / 'config.json'}: field 'text_config.{field}' is missing"


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_a_missing_id_is_named(field, tmp_path):
    with pytest.raises(ValueError, match=f"field '{field}' is missing"):
        read({k: v for k, v in RELEASE.items() if k != field}, tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "field 'model_type' is None; allowed: 'kimi_k3' or 'kimi_linear'"),
        ('{"model_type": "llama"}', "field 'model_type' is 'llama'; allowed: 'kimi_k3' or 'kimi_linear'"),
        ('{"model_type": "kimi_k3"}', "field 'text_config' is missing"),
        ('{"model_type": "kimi_k3", "text_config": 3}', "field 'text_config' is missing"),
        ('{"model_type": "kimi_linear"}', "field 'vocab_size' is missing"),
    ],
)
def test_a_wrong_file_is_named(content, words, tmp_path):
    with pytest.raises(ValueError) as error:
        read(content, tmp_path)
    assert words in str(error.value) and str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"], ids=["nested", "digits"])
def test_a_file_no_reader_can_take_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        K3Config.from_json(tmp_path)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="not valid JSON"):
        K3Config.from_json(tmp_path)


def test_no_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.*no such file"):
        K3Config.from_json(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        K3Config.from_json(tmp_path)


@pytest.mark.parametrize("section", ["vision_config", "quantization_config"])
def test_a_section_that_is_no_object_is_named(section, tmp_path):
    document = copy.deepcopy(RELEASE)
    (document if section == "vision_config" else document["text_config"])[section] = "x"
    with pytest.raises(ValueError, match=f"field '{section}' is 'x'; it must be an object or null"):
        read(document, tmp_path)


# ------------------------------------------------------------------ the record


def test_there_is_no_config_without_arguments():
    with pytest.raises(TypeError):
        K3Config()


def test_it_is_frozen_and_compares_by_its_fields(tmp_path):
    cfg = K3Config.tiny()
    with pytest.raises(FrozenInstanceError):
        cfg.hidden_size = 3
    assert cfg == K3Config.tiny() != K3Config.small()
    assert read(RELEASE, tmp_path) == K3Config.k3(), "where it was read from does not count"
    assert "source" not in repr(cfg)


def test_the_release_field_by_field():
    cfg = K3Config.k3()
    text = {k: v for k, v in TEXT.items() if hasattr(cfg, k) and k not in ("architectures", "model_type")}
    text.pop("quantization_config")
    assert {k: getattr(cfg, k) for k in text} == text
    assert (cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size) == (96, 128, 4)
    assert (cfg.gate_lower_bound, cfg.use_full_rank_gate) == (-5.0, True)
    assert list(cfg.kda_layers) == LINEAR_ATTENTION["kda_layers"] and list(cfg.full_attn_layers) == MLA_LAYERS
    assert {k: getattr(cfg, k) for k in VISION if hasattr(cfg, k)} == {
        k: tuple(v) if isinstance(v, list) else v for k, v in VISION.items() if hasattr(cfg, k)
    }
    assert cfg.quantization_config == TEXT["quantization_config"]
    assert (cfg.qk_norm_eps, cfg.vision_norm_eps) == (1e-6, torch.finfo(torch.float32).eps)
    assert (cfg.qk_head_dim, cfg.latent_cache_size, cfg.latent_size, cfg.shared_size) == (192, 576, 3584, 6144)
    assert cfg.text_prefix == "language_model."


def test_item_03_the_layer_lists_count_from_one():
    """Item 3: 0-based layers 3, 91 and 92 are MLA; 0, 2, 4 and 90 are KDA; 69 and 24 of them."""
    kinds = K3Config.k3().kinds
    assert [kinds[l] for l in (3, 91, 92)] == ["mla"] * 3
    assert [kinds[l] for l in (0, 2, 4, 90)] == ["kda"] * 4
    assert (kinds.count("kda"), kinds.count("mla")) == (69, 24)


def test_the_first_layer_is_dense_and_the_others_have_experts():
    cfg = K3Config.k3()
    assert [l for l in range(93) if not cfg.is_moe(l)] == [0]
    assert [l for l in range(9) if replace(cfg, moe_layer_freq=3).is_moe(l)] == [3, 6]


def test_expert_format_follows_the_quantization_section(golden):
    assert K3Config.k3().expert_format == "mxfp4-pack-quantized" and K3Config.tiny().expert_format is None
    packed = with_expert_format(K3Config.tiny(), "mxfp4")
    assert packed == K3Config.tiny() and packed.quantization_config == mxfp4_quantization()
    assert packed.quantization_config == TEXT["quantization_config"]
    assert with_expert_format(packed, "mxfp4").to_dict() == packed.to_dict()
    assert with_expert_format(K3Config.k3(), "bf16").expert_format is None
    assert with_expert_format(K3Config.k3(), None).to_dict().keys() == K3Config.k3().to_dict().keys()
    flat = with_expert_format(golden("d_kimi_linear_6l").config, None)
    assert flat.to_dict() == golden("d_kimi_linear_6l").config.to_dict()


# ------------------------------------------------------------------ the family


@pytest.mark.parametrize("preset", PRESETS)
def test_at_its_own_depth_a_preset_is_itself(preset):
    assert preset().at_depth(preset().num_hidden_layers) == preset()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depths", [range(1, 34), range(34, 67), range(67, 101)], ids=["1-33", "34-66", "67-100"])
def test_one_dial_keeps_the_proportions(preset, depths):
    origin = preset()
    blocks = -(-origin.num_hidden_layers // origin.attn_res_block_size)
    for depth in depths:
        cfg = origin.at_depth(depth)  # building it validates it
        full = [l for l in range(1, depth + 1) if l % 4 == 0 or l == depth]
        assert list(cfg.full_attn_layers) == full, "3:1 and the closing MLA layer"
        assert list(cfg.kda_layers) == [l for l in range(1, depth + 1) if l not in full]
        assert cfg.num_hidden_layers == depth == len(cfg.kinds)
        # the same number of AttnRes blocks, as far as whole layers allow
        assert cfg.attn_res_block_size - 1 < depth / blocks <= cfg.attn_res_block_size
        # experts and top-k keep their ratio; top-k grows with depth
        ratio = origin.num_experts / origin.num_experts_per_token
        assert cfg.num_experts == round(cfg.num_experts_per_token * ratio)
        scale = depth / origin.num_hidden_layers
        assert cfg.num_experts_per_token == max(1, round(origin.num_experts_per_token * scale))
        # width grows with depth in whole heads of the same size
        assert cfg.kda_head_dim == origin.kda_head_dim and cfg.qk_head_dim == origin.qk_head_dim
        assert cfg.kda_num_heads == max(1, round(origin.kda_num_heads * scale))
        per_head = origin.hidden_size / origin.kda_num_heads
        assert abs(cfg.hidden_size - per_head * cfg.kda_num_heads) <= 16
        for name in ("intermediate_size", "moe_intermediate_size", "routed_expert_hidden_size", "kv_lora_rank"):
            wanted = getattr(origin, name) * cfg.hidden_size / origin.hidden_size
            assert abs(getattr(cfg, name) - wanted) <= 16 or getattr(cfg, name) == 32, name
        assert cfg.num_shared_experts == origin.num_shared_experts and cfg.vocab_size == origin.vocab_size


@pytest.mark.parametrize("depth", [1, 2, 5, 13, 25])
def test_every_depth_builds_and_survives_a_file(depth, tmp_path, unchecked):
    for cfg in (K3Config.tiny().at_depth(depth), K3Config.k3().at_depth(depth)):
        build(cfg)
        assert read(cfg.to_json(), tmp_path) == cfg


def test_the_dial_works_on_the_class_too():
    assert K3Config.at_depth(9) == K3Config.small()
    assert K3Config.at_depth(20) == K3Config.small().at_depth(20)
    assert K3Config.tiny().at_depth(9, vocab_size=2048).vocab_size == 2048


@pytest.mark.parametrize("depth", [0, -3, 2.0, "9", None])
def test_an_impossible_depth_is_refused(depth, unchecked):
    with pytest.raises(ValueError, match=r"at_depth\(.*a whole number of at least 1"):
        K3Config.tiny().at_depth(depth)


@pytest.mark.parametrize("depth", [100_001, 99_999_999_999, 10**30])
def test_a_depth_beyond_bounds_is_refused(depth):
    with pytest.raises(ValueError, match=rf"at_depth\({depth}\): the depth must be at most 100000"):
        K3Config.tiny().at_depth(depth)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_hidden_layers", 10**30, "a whole number may not be above 2147483647"),
        ("num_hidden_layers", 100_001, "it must be at most 100000"),
        ("hidden_size", 10**30, "a whole number may not be above 2147483647"),
        ("vocab_size", 2**31, "a whole number may not be above 2147483647"),
        ("hidden_size", 1e30, "it must be a whole number"),
        ("bos_token_id", -(10**30), "a whole number may not be above 2147483647"),
        ("kda_layers", (1, 2, 3, 10**30), "a whole number may not be above"),
        ("rms_norm_eps", 10**400, "a whole number may not be above"),
        ("routed_scaling_factor", 10**30, "a whole number may not be above"),
    ],
)
def test_numbers_without_bound_are_refused(field, value, rule, unchecked):
    with pytest.raises(ValueError) as error:
        replace(K3Config.tiny(), **{field: value})
    assert f"field {field!r} is {value!r}; {rule}" in str(error.value)


@pytest.mark.parametrize(("preset", "millions"), [(K3Config.tiny, 1.5), (K3Config.small, 30), (K3Config.base, 1300)])
def test_presets_have_their_size(preset, millions):
    size = sum(p.numel() for p in build(preset()).parameters()) / 1e6
    assert millions / 2 < size < millions * 2


# ------------------------------------------------------------------ what is refused

EYES = {
    "vt_hidden_size": 8,
    "vt_num_hidden_layers": 1,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 16,
    "vt_intermediate_size": 8,
    "patch_size": 2,
    "init_pos_emb_height": 2,
    "init_pos_emb_width": 2,
    "init_pos_emb_time": 2,
    "merge_kernel_size": (2, 2),
    "mm_hidden_size": 8,
    "text_hidden_size": 128,
    "projector_ln_eps": 1e-5,
}
COUNTS = """
vocab_size hidden_size num_hidden_layers intermediate_size kda_num_heads kda_head_dim short_conv_kernel_size
num_attention_heads num_key_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim num_experts
num_experts_per_token moe_intermediate_size routed_expert_hidden_size moe_layer_freq attn_res_block_size
max_position_embeddings vt_hidden_size vt_num_hidden_layers vt_num_attention_heads qkv_hidden_size
vt_intermediate_size patch_size init_pos_emb_height init_pos_emb_width init_pos_emb_time mm_hidden_size
""".split()
POSITIVE = """
rms_norm_eps qk_norm_eps vision_norm_eps projector_ln_eps activation_situ_beta activation_situ_linear_beta
routed_scaling_factor
""".split()
RULES = [
    *((name, 0, "it must be at least 1") for name in COUNTS),
    *((name, -1, "it must be at least 0") for name in ("qk_rope_head_dim", "num_shared_experts")),
    *((name, -1, "it must be at least 0") for name in ("first_k_dense_replace", "num_nextn_predict_layers")),
    ("initializer_range", -0.1, "it must be at least 0"),
    *((name, 0.0, "it must be above 0") for name in POSITIVE),
    # kinds
    ("hidden_size", 128.0, "it must be a whole number"),
    ("hidden_size", True, "it must be a whole number"),
    ("q_lora_rank", "32", "it must be a whole number or null"),
    ("rms_norm_eps", float("nan"), "it must be a finite number"),
    ("rms_norm_eps", None, "it must be a finite number"),
    ("gate_lower_bound", "low", "it must be a finite number or null"),
    ("moe_renormalize", 1, "it must be true or false"),
    ("hidden_act", None, "it must be a text"),
    ("kda_layers", 3, "it must be a list of whole numbers"),
    ("kda_layers", (1, "2", 3), "it must be a list of whole numbers"),
    ("merge_kernel_size", (2, 2, 2), "it must be a list of two whole numbers or null"),
    ("bos_token_id", None, "it must be a whole number"),
    # the schedule
    ("kda_layers", (1, 2, 3, 4), "layers [4] are also in full_attn_layers; the lists may not overlap"),
    ("kda_layers", (1, 3), "layers [2] (counted from 1) are in neither kda_layers nor full_attn_layers"),
    ("full_attn_layers", (0, 4, 5), "it must list each layer once, counted from 1"),
    ("full_attn_layers", (4, 5, 5), "it must list each layer once, counted from 1"),
    ("num_hidden_layers", 10**5, "layers [6, 7, 8, 9, 10, 11, 12, 13, ...] (counted from 1) are in neither"),
    # attention
    ("num_key_value_heads", 2, "MLA needs as many as num_attention_heads = 4"),
    ("mla_use_nope", False, "only true is supported"),
    ("gate_lower_bound", -5.5, "it must lie in [-5, 0)"),
    ("gate_lower_bound", 0.0, "it must lie in [-5, 0)"),
    ("attn_res_block_size", None, "kimi_k3 needs a block size of at least 1"),
    # experts
    ("num_experts_per_token", 9, "it may not be above num_experts = 8"),
    ("hidden_act", "relu", "allowed: 'situ' or 'silu'"),
    ("moe_router_activation_func", "softmax", "allowed: 'sigmoid'"),
    ("num_expert_group", 2, "only 1 is supported"),
    ("topk_group", 2, "only 1 is supported"),
    # the rest
    ("tie_word_embeddings", True, "only false is supported"),
    ("num_nextn_predict_layers", 2, "only 0 and 1 are supported"),
    ("dtype", "int8", "allowed: bfloat16, float16, float32, float64"),
    ("model_type", "kimi_k2", "allowed: 'kimi_k3' or 'kimi_linear'"),
    *((name, 1024, "it must be an id below vocab_size = 1024") for name in ("bos_token_id", "eos_token_id")),
    *((name, -1, "it must be an id below vocab_size") for name in ("pad_token_id", "media_placeholder_token_id")),
    # eyes
    *((name, None, "a model with a vision tower (vt_hidden_size = 8) needs it") for name in list(EYES)[1:]),
    ("merge_kernel_size", (0, 2), "both numbers must be at least 1"),
    ("qkv_hidden_size", 15, "it must divide by vt_num_attention_heads = 2"),
    ("qkv_hidden_size", 12, "its head width must divide by 4"),
    ("text_hidden_size", 64, "it must equal hidden_size = 128"),
    ("mm_hidden_size", 16, "it must equal vt_hidden_size = 8"),
    ("vt_hidden_size", None, "vt_hidden_size is null"),
]


@pytest.mark.parametrize(("field", "value", "rule"), RULES, ids=[f"{n}={v}"[:60] for n, v, _ in RULES])
def test_each_rule_gives_field_value_and_rule(field, value, rule, unchecked):
    with pytest.raises(ValueError) as error:
        replace(K3Config.tiny(**EYES), **{field: value})
    message = str(error.value)
    assert field in message and rule in message
    offender = message.split("'")[1]
    assert repr(value) in message or offender != field


def test_full_attention_residuals_need_attention_residuals(golden):
    with pytest.raises(ValueError, match=r"attn_res_full.*attn_res_block_size is null"):
        replace(golden("d_kimi_linear_6l").config, attn_res_full=True)


@pytest.mark.parametrize("field", ["routed_expert_hidden_size", "moe_intermediate_size"])
def test_packed_experts_need_whole_blocks(field):
    packed = with_expert_format(K3Config.tiny(), "mxfp4")
    with pytest.raises(ValueError, match=f"'{field}' is 48; with MXFP4 experts it must be a multiple of 32"):
        replace(packed, **{field: 48})
    assert getattr(replace(K3Config.tiny(), **{field: 48}), field) == 48, "plain experts need not"


def test_packed_experts_without_a_latent_need_a_width_of_whole_blocks():
    packed = with_expert_format(K3Config.tiny(), "mxfp4")
    with pytest.raises(ValueError, match=r"routed_expert_hidden_size.*multiple of 32"):
        replace(packed, routed_expert_hidden_size=None, hidden_size=144)


def test_another_quantization_is_refused(tmp_path):
    document = copy.deepcopy(RELEASE)
    document["text_config"]["quantization_config"]["format"] = "pack-quantized"
    with pytest.raises(ValueError, match=r"quantization_config\.format' is 'pack-quantized'; allowed"):
        read(document, tmp_path)


def test_a_config_cut_to_fewer_layers_keeps_the_long_lists():
    cut = replace(K3Config.k3(), num_hidden_layers=5)
    assert cut.kinds == ("kda", "kda", "kda", "mla", "kda") and len(cut.kda_layers) == 69


# ------------------------------------------------------------------ random corruption

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([10**7, -(10**7), 0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), "", "x", "silu", {}]),
    st.lists(st.integers(-1, 6), max_size=6),
    st.just([[1], None]),
)
FIELDS = [f.name for f in fields(K3Config) if f.name != "source"]
FUZZ = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
BASES = [K3Config.tiny(), K3Config.tiny(**EYES), with_expert_format(K3Config.tiny(), "mxfp4")]


def small_enough(cfg):
    return max(v for v in cfg.__dict__.values() if isinstance(v, int)) < 10**6 or cfg.max_position_embeddings >= 10**6


@settings(FUZZ)
@given(st.sampled_from(BASES), st.sampled_from(FIELDS), JUNK)
@example(BASES[0], "num_hidden_layers", 7)
@example(BASES[1], "vt_hidden_size", 7)
def test_any_corrupted_field_is_named_or_builds(unchecked, base, field, value):
    try:
        cfg = replace(base, **{field: value})
        if small_enough(cfg):
            build(cfg)
    except ValueError as error:
        assert field in str(error)
    else:
        assert json.loads(cfg.to_json()) == cfg.to_dict()


def places(document, prefix=()):
    for key, value in document.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from places(value, (*prefix, key))


SMALL_DOCUMENT = with_expert_format(K3Config.tiny(**EYES), "mxfp4").to_dict()
READ_KEYS = {f.name for f in fields(K3Config)} | {"num_heads", "head_dim"}
SECTIONS = {"text_config", "vision_config", "linear_attn_config", "quantization_config", "format"}


@settings(FUZZ)
@given(st.sampled_from(sorted(places(SMALL_DOCUMENT))), JUNK)
def test_any_corrupted_entry_of_a_file_is_named_or_comes_back(unchecked, tmp_path, place, value):
    document = copy.deepcopy(SMALL_DOCUMENT)
    node = document
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = value
    path = tmp_path / "corrupted.json"
    path.write_text(json.dumps(document))
    try:
        cfg = K3Config.from_json(path)
    except ValueError as error:
        assert str(path) in str(error) and (place[-1] in str(error) or place[-1] in ("num_heads", "head_dim"))
        assert place[-1] in READ_KEYS | SECTIONS, "only what is read can be refused"
    else:
        assert json.dumps(cfg.to_dict()) == json.dumps(document)
