"""`nanok3 export --gguf`: names, shapes and values, refusals, and where it is installed, llama.cpp's own logits."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_reader import read_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

import nanok3
from nanok3.data.tokenizer import Tokenizer, train_tokenizer
from nanok3.model.mtp import attach, save_prediction
from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.stages.export import ExportArgs, main

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "bench" / ".venv-peers" / "peers" / "llama.cpp" / "build" / "bin"
WORDS = "the cat's hat, The hats DON'T fit thatCamelCase fat cats; 漢字 漢字 12 123"
BYTES = {bytes([byte]): byte for byte in range(256)}
CONFIG = nanok3.K3Config.tiny().with_vocabulary(600)
"""Five layers: KDA, KDA, KDA, MLA, MLA."""


def random_model(cfg: nanok3.K3Config) -> nanok3.K3:
    """Weights that keep a signal's size, none of them zero."""
    model = nanok3.K3(cfg)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(std=1 if "embed_tokens" in name else value.shape[-1] ** -0.5)
            else:
                value.add_(0.1 * torch.randn_like(value))
        for value in model.buffers():
            value.add_(0.05 * torch.randn_like(value))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as float32, as bfloat16 and with packed experts; the last has a tokenizer."""
    torch.manual_seed(0)
    model, root = random_model(CONFIG), tmp_path_factory.mktemp("models")
    nanok3.save(model, root / "float32", dtype=torch.float32)
    nanok3.save(model, root / "bf16")
    nanok3.save(model, root / "mxfp4", experts="mxfp4")
    Tokenizer(BYTES).save(root / "mxfp4")
    return {name: root / name for name in ("float32", "bf16", "mxfp4")}


@pytest.fixture
def export(folders: dict[str, Path], tmp_path: Path):
    """export(folder, dtype) -> the file, read back."""

    def run(folder: str, dtype: str):
        main(ExportArgs(model=folders[folder], gguf=tmp_path / "x.gguf", dtype=dtype))
        return read_gguf(tmp_path / "x.gguf")

    return run


def state(folder: Path) -> dict[str, Tensor]:
    return {name: value.double() for name, value in nanok3.load(folder, dtype=torch.float32).state_dict().items()}


# ---------------------------------------------------------------------- what the file holds


def test_float32_values_are_ours_bit_for_bit(export, folders: dict[str, Path]) -> None:
    read, ours = export("float32", "f32"), state(folders["float32"])
    layer, t = "model.layers.1.self_attn", read.tensors
    for their, our in {"attn_q": "q_proj", "ssm_f_b": "f_b_proj", "ssm_g": "g_proj", "attn_output": "o_proj"}.items():
        assert torch.equal(t[f"blk.1.{their}.weight"], ours[f"{layer}.{our}.weight"])
    assert torch.equal(t["blk.1.ssm_conv1d_k.weight"].squeeze(), ours[f"{layer}.k_conv1d.weight"].squeeze())
    assert torch.equal(t["blk.1.ssm_a"], (-ours[f"{layer}.A_log"].exp()).float().double())
    assert torch.equal(t["blk.1.ssm_dt.bias"], ours[f"{layer}.dt_bias"])
    moe = "model.layers.2.block_sparse_moe"
    for their, our in {"gate": "w1", "down": "w2", "up": "w3"}.items():
        assert torch.equal(t[f"blk.2.ffn_{their}_exps.weight"], ours[f"{moe}.experts.{our}"])
    assert torch.equal(t["blk.2.exp_probs_b.bias"], ours[f"{moe}.gate.e_score_correction_bias"])
    assert torch.equal(t["blk.2.ffn_routed_down.weight"], ours[f"{moe}.routed_expert_down_proj.weight"])
    assert torch.equal(t["blk.0.ffn_down.weight"], ours["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(t["token_embd.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(t["output.weight"], ours["lm_head.weight"])
    assert set(read.types.values()) == {0}


def test_a_read_over_depth_is_one_vector(export, folders: dict[str, Path]) -> None:
    read, ours = export("float32", "f32"), state(folders["float32"])
    for their, our in {
        "blk.3.ffn_res_score": "model.layers.3.mlp_res",
        "output_res_score": "model.output_attn_res",
    }.items():
        product = ours[f"{our}_norm.weight"] * ours[f"{our}_proj.weight"][0]
        assert torch.equal(read.tensors[f"{their}.weight"], product.float().double()) and product.abs().max() > 0.1


def test_keys_and_values_are_split_for_absorbed_attention(export, folders: dict[str, Path]) -> None:
    read, cfg = export("float32", "f32"), CONFIG
    both = state(folders["float32"])["model.layers.3.self_attn.kv_b_proj.weight"]
    both = both.view(cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank)
    for head in range(cfg.num_attention_heads):
        assert torch.equal(read.tensors["blk.3.attn_k_b.weight"][head], both[head, : cfg.qk_nope_head_dim].T)
        assert torch.equal(read.tensors["blk.3.attn_v_b.weight"][head], both[head, cfg.qk_nope_head_dim :])


@pytest.mark.parametrize("stored", ["bf16", "mxfp4"])
def test_four_bit_experts_are_the_stored_ones_or_the_nearest(export, folders: dict[str, Path], stored: str) -> None:
    read, ours = export(stored, "mxfp4"), state(folders[stored])
    for their, our in {"gate": "w1", "down": "w2", "up": "w3"}.items():
        name, values = f"blk.4.ffn_{their}_exps.weight", ours[f"model.layers.4.block_sparse_moe.experts.{our}"]
        assert read.types[name] == 39
        assert torch.equal(read.tensors[name], dequantize_mxfp4(*quantize_mxfp4(values), torch.float64))
        assert stored == "bf16" or torch.equal(read.tensors[name], values), "packed experts only move"


def test_packed_experts_unpack_exactly(export, folders: dict[str, Path]) -> None:
    for dtype in ("f32", "bf16"):
        read, ours = export("mxfp4", dtype), state(folders["mxfp4"])
        assert torch.equal(read.tensors["blk.1.ffn_up_exps.weight"], ours["model.layers.1.block_sparse_moe.experts.w3"])


def test_what_operators_need_in_float32_is_not_rounded(export, folders: dict[str, Path]) -> None:
    read = export("mxfp4", "bf16")
    kept = ("norm.weight", "_score.weight", "ssm_a", ".bias", "ffn_gate_inp.weight")
    for name, kind in read.types.items():
        assert kind == (0 if name.endswith(kept) or "conv1d" in name else 30), name


def test_the_hyperparameters_are_the_configs(export) -> None:
    keys, cfg = export("mxfp4", "mxfp4").keys, CONFIG
    assert keys["general.architecture"] == "kimi-k3" and keys["general.file_type"] == 38
    own = {name.removeprefix("kimi-k3."): value for name, value in keys.items() if name.startswith("kimi-k3.")}
    assert own["attention.head_count_kv"] == [0, 0, 0, 1, 1]
    assert own["attention.key_length"] == own["attention.value_length"] + own["rope.dimension_count"]
    assert own["attention.key_length_mla"] == cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
    assert own["expert_used_count"] == cfg.num_experts_per_token and own["expert_weights_norm"] is True
    assert own["kda.gate_lower_bound"] == -5 and own["attn_res.block_size"] == cfg.attn_res_block_size
    assert own["vocab_size"] == 600


# ---------------------------------------------------------------------- tokenizer, notices, refusals


def test_the_tokenizer_goes_along(export) -> None:
    keys = export("mxfp4", "bf16").keys
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == "kimi-k2"
    assert keys["tokenizer.ggml.tokens"][256 + 1] == "[EOS]" and len(keys["tokenizer.ggml.tokens"]) == 600
    assert keys["tokenizer.ggml.eos_token_id"] == CONFIG.eos_token_id


def test_without_a_tokenizer_it_is_said(export, capsys) -> None:
    assert export("bf16", "bf16").keys["tokenizer.ggml.model"] == "none"
    assert "ids, not text" in capsys.readouterr().out


def test_rounding_and_vision_are_said(export, golden, capsys, tmp_path: Path) -> None:
    export("bf16", "mxfp4")
    assert "rounded to four bits" in capsys.readouterr().out
    eyes = {name: getattr(golden("f_k3_4l_small").config, name) for name in VISION}
    cfg = replace(CONFIG, **eyes, text_hidden_size=CONFIG.hidden_size, media_placeholder_token_id=5)
    nanok3.save(nanok3.K3(cfg), tmp_path / "eyes")
    main(ExportArgs(model=tmp_path / "eyes", gguf=tmp_path / "y.gguf"))
    assert "vision tower" in capsys.readouterr().out
    assert not [name for name in read_gguf(tmp_path / "y.gguf").tensors if "vision" in name]


def test_a_prediction_layer_is_said_to_be_left_out(capsys, tmp_path: Path) -> None:
    model = nanok3.K3(CONFIG)
    attach(model)
    nanok3.save(model, tmp_path / "with")
    main(ExportArgs(model=tmp_path / "with", gguf=tmp_path / "y.gguf"))
    assert "prediction layer" not in capsys.readouterr().out, "a folder without"
    save_prediction(model, tmp_path / "with")
    main(ExportArgs(model=tmp_path / "with", gguf=tmp_path / "y.gguf"))
    assert "the prediction layer is left out" in capsys.readouterr().out


VISION = (
    "vt_hidden_size", "vt_num_hidden_layers", "vt_num_attention_heads", "qkv_hidden_size", "vt_intermediate_size",
    "patch_size", "init_pos_emb_height", "init_pos_emb_width", "init_pos_emb_time", "merge_kernel_size",
    "mm_hidden_size", "projector_ln_eps",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_res_full": True}, "attn_res_full is True"),
        ({"kda_num_heads": 5}, "num_attention_heads is 4: must equal 5"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"use_full_rank_gate": False}, "use_full_rank_gate is False"),
        ({"moe_intermediate_size": 40}, "moe_intermediate_size is 40: MXFP4 needs a multiple of 32"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(tmp_path: Path, changes: dict, reason: str) -> None:
    replace(CONFIG, **changes).to_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match=reason):
        main(ExportArgs(model=tmp_path, gguf=tmp_path / "x.gguf", dtype="mxfp4"))
    assert not (tmp_path / "x.gguf").exists()


def test_a_target_in_the_way_is_left_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    os.mkfifo(tmp_path / "pipe")  # which has no first bytes to look at, and nobody who reads
    for path in (tmp_path, tmp_path / "notes", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="gguf is"):
            main(ExportArgs(model=folders["bf16"], gguf=path))
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_checkpoint_that_lacks_a_tensor_leaves_no_file(folders: dict[str, Path], tmp_path: Path) -> None:
    replace(CONFIG, num_experts=9).to_json(tmp_path / "config.json")
    (tmp_path / "model.safetensors").symlink_to(folders["bf16"] / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*experts\.8\.w1\.weight"):
        main(ExportArgs(model=tmp_path, gguf=tmp_path / "x.gguf"))
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".x*"))


UP, EXPERT = "language_model.model.layers.0.mlp.up_proj.weight", "block_sparse_moe.experts.3.w2.weight"
DAMAGE = {
    "NaN in a matrix": (
        "float32",
        UP,
        lambda x: x.index_fill(0, torch.tensor(3), torch.nan),
        r"up_proj.* holds inf or",
    ),
    "inf in an expert": ("bf16", EXPERT, lambda x: x * torch.inf, r"experts\.3\.w2\.weight holds inf or NaN"),
    "NaN in a scale": ("mxfp4", f"{EXPERT}_scale", lambda x: x | 255, r"w2\.weight_scale holds inf or NaN"),
    "whole numbers": ("bf16", UP, lambda x: x.to(torch.int32), r"up_proj\.weight is I32 .*, expected BF16"),
    "bytes": ("bf16", UP, lambda x: x.to(torch.uint8), r"up_proj\.weight is U8 .*, expected BF16"),
    "numbers for codes": (
        "mxfp4",
        f"{EXPERT}_packed",
        lambda x: x.float(),
        r"w2\.weight_packed is F32 .*, expected U8",
    ),
    "another shape": (
        "bf16",
        UP,
        lambda x: x.flatten(),
        r"up_proj\.weight is BF16 \[\d+\], expected BF16 \[\d+, \d+\]",
    ),
    "a tensor too many": ("bf16", UP.replace("up_", "side_"), None, r"1 unknown: .*side_proj"),
}


@pytest.mark.parametrize("dtype", ["bf16", "mxfp4"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_tensor_is_named_and_leaves_no_file(
    folders: dict[str, Path], tmp_path: Path, kind: str, dtype: str
) -> None:
    source, ending, change, said = DAMAGE[kind]
    tensors = load_file(folders[source] / "model.safetensors")
    if change is None:
        tensors[ending] = torch.ones(3)
    else:
        name = next(name for name in tensors if name.endswith(ending))
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders[source] / "config.json").read_bytes())
    with pytest.raises(ValueError, match=said):
        main(ExportArgs(model=tmp_path, gguf=tmp_path / "out" / "x.gguf", dtype=dtype))
    assert not list((tmp_path / "out").glob("*")) and not list((tmp_path / "out").glob(".*"))


def test_a_huge_rate_is_capped_as_the_model_caps_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """inf would make NaN of 0 * inf there."""
    tensors = load_file(folders["bf16"] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("A_log"))
    tensors[name] = tensors[name].fill_(100)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["bf16"] / "config.json").read_bytes())
    main(ExportArgs(model=tmp_path, gguf=tmp_path / "x.gguf"))
    rates = read_gguf(tmp_path / "x.gguf").tensors["blk.0.ssm_a"]
    assert torch.equal(rates, torch.full_like(rates, -torch.tensor(80.0).double().exp().float().item()))


def test_a_number_too_large_for_the_file_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    replace(CONFIG, activation_situ_beta=1e300).to_json(tmp_path / "config.json")
    (tmp_path / "model.safetensors").symlink_to(folders["bf16"] / "model.safetensors")
    with pytest.raises(ValueError, match=r"kimi-k3.activation.situ_beta is 1e\+300: the file has 32 bits"):
        main(ExportArgs(model=tmp_path, gguf=tmp_path / "x.gguf"))


def test_a_folder_may_have_any_name(folders: dict[str, Path], tmp_path: Path) -> None:
    strange = tmp_path / os.fsdecode(b"latin \xe9")
    try:
        strange.symlink_to(folders["bf16"])
        place = tmp_path / os.fsdecode(b"copy \xe9")
        shutil.copytree(strange, place)
    except OSError:
        pytest.skip("this file system's names are UTF-8")
    main(ExportArgs(model=place, gguf=tmp_path / "x.gguf"))
    assert read_gguf(tmp_path / "x.gguf").keys["general.name"] == "copy \ufffd"


def test_what_a_killed_export_left_makes_room_for_the_next(folders: dict[str, Path], tmp_path: Path) -> None:
    left = tmp_path / ".x.gguf-abcd1234"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    main(ExportArgs(model=folders["bf16"], gguf=tmp_path / "x.gguf"))
    assert not left.exists() and (tmp_path / "x.gguf").exists()


# ---------------------------------------------------------------------- llama.cpp itself


@functools.cache
def why_no_peer() -> str | None:
    if not (BUILD / "llama_logits").exists():
        return "llama.cpp is not built here; `python bench/peers.py llama.cpp` builds it"
    return None


peer = pytest.mark.skipif(why_no_peer() is not None, reason=str(why_no_peer()))


def their_logits(file: Path, ids: Tensor, prefill: int) -> Tensor:
    ids_file, out = file.with_suffix(".ids"), file.with_suffix(".f32")
    ids_file.write_text(" ".join(map(str, ids.tolist())))
    command = [BUILD / "llama_logits", file, ids_file, out, "1", str(prefill)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32).view(len(ids), -1).double()


@peer
@pytest.mark.parametrize("prefill", [40, 17])
def test_llama_cpp_computes_our_logits(folders: dict[str, Path], tmp_path: Path, prefill: int) -> None:
    """Up to float32 rounding, in one call and token by token."""
    main(ExportArgs(model=folders["float32"], gguf=tmp_path / "x.gguf", dtype="f32", vocabulary="none"))
    ids = torch.randint(0, 600, (40,))
    theirs = their_logits(tmp_path / "x.gguf", ids, prefill)
    with torch.no_grad():
        ours = nanok3.load(folders["float32"], dtype=torch.float64)(ids[None]).logits[0]
    error = (theirs - ours).norm(dim=1) / ours.norm(dim=1)
    assert error.max() < 3e-5, error.max()


@peer
def test_llama_cpp_cuts_text_as_we_do(tmp_path: Path) -> None:
    nanok3.save(nanok3.K3(CONFIG), tmp_path / "m", experts="mxfp4")
    tokenizer = train_tokenizer([WORDS, WORDS], 540)
    tokenizer.save(tmp_path / "m")
    main(ExportArgs(model=tmp_path / "m", gguf=tmp_path / "x.gguf"))
    text = f"{WORDS} 12345;\n\n  [EOS] ümlaut\t!"
    command = [
        BUILD / "llama-tokenize",
        "-m",
        tmp_path / "x.gguf",
        "-p",
        text,
        "--ids",
        "--no-parse-special",
        "--no-escape",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.stdout.strip() == str(tokenizer.encode(text)), done.stderr[-2000:]
