"""Checkpoints in the official layout: the whole table of names, exact round trips, and errors that say everything."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanok3.config import K3Config, with_expert_format
from nanok3.model import weights as weights_module
from nanok3.model.decoder import K3
from nanok3.model.latent_moe import Experts, PackedExperts
from nanok3.model.weights import disk_tensors, load, read_header, save

FOLDERS = ["a_k3_13l", "b_k3_7l", "c1_k3_1l_kda", "c2_k3_1l_mla", "d_kimi_linear_6l", "e_k3_5l_realheads"]
FOLDERS += ["f_k3_4l_small"]
FLOAT32_ENDINGS = ("A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight")
FLOAT32_ENDINGS += ("e_score_correction_bias",)

pytestmark = pytest.mark.usefixtures("unchecked")  # models are built by the dozen here; shapes are checked elsewhere


# ------------------------------------------------------------------ the table of the release


def release_table():
    """Architecture section 2, line by line: name -> (shape, dtype)."""
    H, V = 7168, 163840
    table = {}

    def add(dtype, prefix="", **shapes):
        for name, shape in shapes.items():
            table[prefix + name.replace("__", ".")] = (tuple(shape), dtype)

    text = "language_model.model."
    add("BF16", text, embed_tokens__weight=[V, H], norm__weight=[H], output_attn_res_norm__weight=[H])
    add("BF16", text, output_attn_res_proj__weight=[1, H])
    add("BF16", "language_model.", lm_head__weight=[V, H])
    for l in range(93):
        layer = f"{text}layers.{l}."
        add("BF16", layer, input_layernorm__weight=[H], post_attention_layernorm__weight=[H])
        add("BF16", layer, self_attention_res_norm__weight=[H], self_attention_res_proj__weight=[1, H])
        add("BF16", layer, mlp_res_norm__weight=[H], mlp_res_proj__weight=[1, H])
        attention = layer + "self_attn."
        if (l + 1) % 4 == 0 or l == 92:
            add("BF16", attention, q_a_proj__weight=[1536, H], q_a_layernorm__weight=[1536])
            add("BF16", attention, q_b_proj__weight=[18432, 1536], kv_a_proj_with_mqa__weight=[576, H])
            add("BF16", attention, kv_a_layernorm__weight=[512], kv_b_proj__weight=[24576, 512])
            add("BF16", attention, g_proj__weight=[12288, H], o_proj__weight=[H, 12288])
        else:
            for name in "qkvg":
                add("BF16", attention, **{f"{name}_proj__weight": [12288, H]})
            for name in "qkv":
                add("F32", attention, **{f"{name}_conv1d__weight": [12288, 1, 4]})
            add("BF16", attention, f_a_proj__weight=[128, H], f_b_proj__weight=[12288, 128], b_proj__weight=[96, H])
            add("F32", attention, A_log=[128], dt_bias=[12288], o_norm__weight=[128])
            add("BF16", attention, o_proj__weight=[H, 12288])
        if l == 0:
            add("BF16", layer + "mlp.", gate_proj__weight=[33792, H], up_proj__weight=[33792, H])
            add("BF16", layer + "mlp.", down_proj__weight=[H, 33792])
            continue
        moe = layer + "block_sparse_moe."
        add("BF16", moe, gate__weight=[896, H])
        add("F32", moe, gate__e_score_correction_bias=[896])
        add("BF16", moe, routed_expert_down_proj__weight=[3584, H], routed_expert_norm__weight=[3584])
        add("BF16", moe, routed_expert_up_proj__weight=[H, 3584])
        add("BF16", moe + "shared_experts.", gate_proj__weight=[6144, H], up_proj__weight=[6144, H])
        add("BF16", moe + "shared_experts.", down_proj__weight=[H, 6144])
        for e in range(896):
            expert = f"{moe}experts.{e}."
            for name in ("w1", "w3"):
                table[f"{expert}{name}.weight_packed"] = ((3072, 1792), "U8")
                table[f"{expert}{name}.weight_scale"] = ((3072, 112), "U8")
            table[f"{expert}w2.weight_packed"] = ((3584, 1536), "U8")
            table[f"{expert}w2.weight_scale"] = ((3584, 96), "U8")
    tower = "vision_tower."
    add("BF16", tower, patch_embed__proj__weight=[1024, 3, 14, 14], patch_embed__pos_emb__weight=[64, 64, 1024])
    add("BF16", tower, encoder__final_layernorm__weight=[1024])
    for b in range(27):
        block = f"{tower}encoder.blocks.{b}."
        add("BF16", block, norm0__weight=[1024], norm1__weight=[1024], wqkv__weight=[4608, 1024])
        add("BF16", block, wo__weight=[1024, 1536], mlp__fc0__weight=[4096, 1024], mlp__fc1__weight=[1024, 4096])
    add("BF16", "mm_projector.", proj__0__weight=[4096, 4096], proj__2__weight=[H, 4096], post_norm__weight=[H])
    return table


def test_every_tensor_of_the_release_from_the_config_alone(release_tensors):
    """497,220 names, shapes and dtypes, and 1,560,860,324,864 bytes."""
    table = release_table()
    assert len(table) == 497_220
    assert {name: (spec.shape, spec.dtype) for name, spec in release_tensors.items()} == table
    assert sum(spec.nbytes for spec in release_tensors.values()) == 1_560_860_324_864


@pytest.mark.parametrize("name", [*FOLDERS, "b_k3_7l_sharded"])
def test_the_table_of_each_official_folder(golden, name):
    folder = golden(name).folder
    found = {}
    for file in folder.glob("model*.safetensors"):
        found |= {n: (e.shape, e.dtype) for n, e in read_header(file).items()}
    assert {n: (spec.shape, spec.dtype) for n, spec in disk_tensors(golden(name).config).items()} == found


def test_item_04_only_routed_experts_are_packed():
    """Item 4: Linear modules that the ignore list forgets are stored as plain bfloat16 all the same."""
    cfg = with_expert_format(K3Config.tiny(), "mxfp4")
    packed = [name for name, spec in disk_tensors(cfg).items() if spec.dtype == "U8"]
    assert packed and all(".block_sparse_moe.experts." in name for name in packed)
    for forgotten in ("routed_expert_down_proj", "routed_expert_up_proj", "mlp_res_proj", "output_attn_res_proj"):
        assert any(f"{forgotten}.weight" in name for name in disk_tensors(cfg))
        assert not any(forgotten in name for name in packed)


# ------------------------------------------------------------------ loading what the official code wrote


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_loaded_is_what_is_stored(golden, name):
    g = golden(name)
    model = g.load()
    for disk, spec in disk_tensors(g.config).items():
        if spec.dtype == "U8":
            continue
        value = model.get_parameter(spec.target) if spec.expert is None and "bias" not in spec.target else None
        value = model.state_dict()[spec.target] if value is None else value
        value = value if spec.expert is None else value[spec.expert]
        stored = g.stored[disk].double()
        if disk.endswith("A_log"):
            stored = stored.flatten()[: g.config.kda_num_heads]
        assert torch.equal(value, stored), disk
    assert {p.dtype for p in model.parameters()} == {torch.float64} and not model.training


def test_item_05_experts_are_decoded_and_stacked_in_order(golden):
    """Item 5, at the loader: w1 gate, w3 up, w2 down, expert e at place e."""
    g = golden("b_k3_7l")
    experts = g.load(torch.bfloat16).model.layers[4].feed_forward.experts
    assert isinstance(experts, Experts)
    for e in (0, 3, 8):
        for name in ("w1", "w2", "w3"):
            stem = f"language_model.model.layers.4.block_sparse_moe.experts.{e}.{name}.weight"
            by_hand = decode(g.stored[f"{stem}_packed"], g.stored[f"{stem}_scale"])
            assert torch.equal(getattr(experts, name)[e].double(), by_hand)


def decode(packed, scale):
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    signs = 1 - 2 * (nibbles >> 3).double()
    return signs * magnitudes[nibbles & 7] * (2.0 ** (scale.double() - 127)).repeat_interleave(32, dim=-1)


def test_shards_give_the_same_model(golden):
    single, sharded = golden("b_k3_7l").load(None), golden("b_k3_7l_sharded").load(None)
    ours, theirs = single.state_dict(), sharded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["e_k3_5l_realheads", "d_kimi_linear_6l"])
def test_item_06_float32_stays_float32(golden, name, dtype):
    """Item 6: seven kinds of tensors are float32 in the file and stay so, whatever the rest is loaded in; the
    correction bias never passes through bfloat16."""
    g = golden(name)
    state = g.load(dtype).state_dict()
    for disk, spec in disk_tensors(g.config).items():
        if spec.dtype == "F32" and not disk.endswith("A_log"):
            assert state[spec.target].dtype == torch.float32
            assert torch.equal(state[spec.target], g.stored[disk]), disk
    biases = [v for n, v in state.items() if n.endswith("correction_bias")]
    assert biases and all(not torch.equal(b, b.bfloat16().float()) for b in biases)
    others = {v.dtype for n, v in state.items() if not n.endswith(FLOAT32_ENDINGS)} - {torch.uint8}
    assert others == {dtype or torch.bfloat16}


def test_as_stored_keeps_the_packed_bytes(golden):
    g = golden("c2_k3_1l_mla")
    model = g.load(None)
    experts = model.model.layers[0].feed_forward.experts
    assert isinstance(experts, PackedExperts)
    stem = "language_model.model.layers.0.block_sparse_moe.experts"
    for e in range(g.config.num_experts):
        for name in ("w1", "w2", "w3"):
            for half in ("packed", "scale"):
                assert torch.equal(getattr(experts, f"{name}_{half}")[e], g.stored[f"{stem}.{e}.{name}.weight_{half}"])


@pytest.mark.parametrize("name", [f for f in FOLDERS if f[0] != "d"])
def test_packed_experts_give_the_same_logits(golden, name):
    """As stored and computed in float64: the official logits; computed in bfloat16: those of the decoded weights."""
    g = golden(name)
    stored, decoded = g.load(None), g.load(torch.bfloat16)
    with torch.no_grad():
        ids = g.ids("len017")
        a, b = stored(ids).logits.double(), decoded(ids).logits.double()
        stored.double()  # the packed bytes stay, and are decoded to float64
        assert (stored(ids).logits[0] - g.expected["len017.logits"]).abs().max() < 1e-9
    each = (a - b).norm(dim=-1) / b.norm(dim=-1)  # grouped products and single ones may round differently
    assert each.median() < 0.02


def test_item_01_the_padding_of_a_log(golden, tmp_path):
    """Item 1: narrowed to one entry a head, and refused where the rest is not zero padding."""
    g = golden("e_k3_5l_realheads")
    name = "language_model.model.layers.1.self_attn.A_log"
    assert g.stored[name].shape == (128,)
    model = g.load(None)
    assert torch.equal(model.model.layers[1].self_attn.A_log, g.stored[name][:2])
    # some exports leave the padding out
    folder = changed(g, tmp_path / "short", lambda t: t.__setitem__(name, t[name][:2].clone()))
    assert torch.equal(load(folder).model.layers[1].self_attn.A_log, g.stored[name][:2])
    folder = changed(g, tmp_path / "long", lambda t: t[name].__setitem__(77, 0.5))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.A_log: entries after the first 2 \(one a head\)"):
        load(folder)


@pytest.mark.parametrize("layers", [1, 4, 5, 9])
def test_item_08_a_config_cut_to_fewer_layers(golden, tmp_path, layers):
    """Item 8: the tensors of the other layers are skipped and the final mix stays valid."""
    g = golden("a_k3_13l")
    shutil.copytree(g.folder, tmp_path / "cut")
    os.chmod(tmp_path / "cut" / "config.json", 0o644)
    replace(g.config, num_hidden_layers=layers).to_json(tmp_path / "cut" / "config.json")
    model = load(tmp_path / "cut", dtype=torch.float64)
    assert len(model.model.layers) == layers
    with torch.no_grad():
        hidden = model(g.ids("len017"), return_hidden=True).hidden
    for l, p in enumerate(hidden.residual):
        assert (p[0] - g.expected[f"len017.layer.{l:02}.p"]).abs().max() < 1e-9
    assert torch.isfinite(hidden.final).all() and len(hidden.bank) == -(-layers // 4)


# ------------------------------------------------------------------ saving and loading again


def stored_tensors(folder):
    tensors = {}
    for file in Path(folder).glob("model*.safetensors"):
        tensors |= load_file(file)
    return tensors


def same_bytes(a, b):
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def same_experts(a, b):
    stems = [name.removesuffix("_packed") for name in a if name.endswith("_packed")]
    return all(
        torch.equal(decode(a[f"{s}_packed"], a[f"{s}_scale"]), decode(b[f"{s}_packed"], b[f"{s}_scale"])) for s in stems
    )


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_official_file_comes_back_byte_for_byte(golden, name, dtype, tmp_path):
    """Loaded as stored or decoded, saved again: every name, shape, dtype and byte, and the config. Experts that were
    decoded on the way come back in value: one value may have two MXFP4 spellings."""
    g = golden(name)
    save(g.load(dtype), tmp_path, experts="mxfp4" if g.config.expert_format else "bf16")
    written = stored_tensors(tmp_path)
    assert written.keys() == g.stored.keys()
    for tensor in written:
        assert written[tensor].shape == g.stored[tensor].shape
        if dtype is None or not tensor.endswith(("_packed", "_scale")):
            assert same_bytes(written[tensor], g.stored[tensor]), tensor
    assert same_experts(written, g.stored)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((g.folder / "config.json").read_text())


def tiny(**changes):
    torch.manual_seed(5)
    model = K3(K3Config.tiny().at_depth(3, **({"num_experts_per_token": 2} | changes)))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    for b in model.buffers():
        torch.nn.init.normal_(b, std=0.1)
    return model


LINEAR = {
    "model_type": "kimi_linear",
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "use_full_rank_gate": False,
    "gate_lower_bound": None,
}


@pytest.mark.parametrize("shard_bytes", [10**9, 200_000, 1])
@pytest.mark.parametrize("variant", [{}, LINEAR], ids=["k3", "kimi_linear"])
def test_a_training_checkpoint_loses_nothing(variant, shard_bytes, tmp_path):
    """float32 in, float32 out, in one file or many."""
    model = tiny(**variant)
    save(model, tmp_path, dtype=torch.float32, max_shard_bytes=shard_bytes)
    again = load(tmp_path)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and after[n].dtype == torch.float32 for n in before)
    assert again.cfg == replace(model.cfg, dtype="float32")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
@pytest.mark.parametrize("shard_bytes", [10**9, 100_000])
def test_experts_packed_or_plain(experts, shard_bytes, tmp_path):
    model = tiny()
    save(model, tmp_path, experts=experts, max_shard_bytes=shard_bytes)
    cfg = K3Config.from_json(tmp_path)
    assert cfg.expert_format == ("mxfp4-pack-quantized" if experts == "mxfp4" else None)
    again = load(tmp_path, dtype=torch.float32)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        if ".experts.w" in name and experts == "mxfp4":
            assert ((a - b).norm() / a.norm()).item() < 0.15
        elif name.endswith(FLOAT32_ENDINGS):
            assert torch.equal(a, b), name
        else:
            assert torch.equal(a.bfloat16().float(), b), name
    # what was packed once keeps its values, and its bytes where they were not decoded on the way
    first = stored_tensors(tmp_path)
    for source, decoded in ((again, True), (load(tmp_path), False)):
        save(source, tmp_path / "again", experts=experts)
        second = stored_tensors(tmp_path / "again")
        assert first.keys() == second.keys() and same_experts(first, second)
        for n in first:
            assert same_bytes(first[n], second[n]) or (decoded and n.endswith(("_packed", "_scale"))), n


def test_packed_experts_can_be_saved_plain(golden, tmp_path):
    g = golden("c2_k3_1l_mla")
    save(g.load(None), tmp_path, experts="bf16")
    assert not any(name.endswith("_packed") for name in stored_tensors(tmp_path))
    with torch.no_grad():
        logits = load(tmp_path, dtype=torch.float64)(g.ids("len017")).logits[0]
    assert (logits - g.expected["len017.logits"]).abs().max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_config_names_the_dtype(dtype, tmp_path):
    model = tiny()
    save(model, tmp_path, dtype=dtype)
    assert K3Config.from_json(tmp_path).dtype == str(dtype).removeprefix("torch.")
    stored = stored_tensors(tmp_path)
    wide = torch.promote_types(dtype, torch.float32)
    assert {t.dtype for n, t in stored.items() if not n.endswith(FLOAT32_ENDINGS)} == {dtype}
    assert {t.dtype for n, t in stored.items() if n.endswith(FLOAT32_ENDINGS)} == {wide}
    assert load(tmp_path).lm_head.weight.dtype == dtype


def test_shards_and_their_index(tmp_path):
    model = tiny()
    save(model, tmp_path, max_shard_bytes=300_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(f.name for f in tmp_path.glob("model-*.safetensors"))
    n = len(files)
    assert n > 2 and files == [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    assert sorted(set(index["weight_map"].values())) == files
    total = 0
    for file in files:
        entries = read_header(tmp_path / file)
        size = sum(e.nbytes for e in entries.values())
        assert size <= 300_000 or len(entries) == 1
        assert {k for k, v in index["weight_map"].items() if v == file} == entries.keys()
        total += size
    assert index["metadata"]["total_size"] == total
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == model.cfg.eos_token_id


def test_stale_files_of_an_earlier_save_are_removed(tmp_path):
    other = ["tokenizer_config.json", "model_card.md", "model-draft.safetensors", "optimizer.safetensors"]
    for name in other:
        (tmp_path / name).write_text("kept")
    save(tiny(), tmp_path, max_shard_bytes=200_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    save(tiny(), tmp_path)
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {p.name for p in tmp_path.iterdir()} == names | set(other)
    save(tiny(), tmp_path, max_shard_bytes=200_000)
    many = {p.name for p in tmp_path.iterdir()} - set(other)
    save(tiny(), tmp_path, max_shard_bytes=400_000)
    fewer = {p.name for p in tmp_path.iterdir()} - set(other)
    assert "model.safetensors" not in fewer and len(fewer) < len(many)
    assert all((tmp_path / name).read_text() == "kept" for name in other)
    load(tmp_path)


@pytest.mark.parametrize("failing", ["first shard", "last shard", "index", "config"])
@pytest.mark.parametrize(
    ("shard_bytes", "error"),
    [(10**9, OSError("disk full")), (200_000, OSError("disk full")), (200_000, KeyboardInterrupt())],
    ids=["one file", "shards", "shards, interrupt"],
)
def test_an_interrupted_save_leaves_the_previous_checkpoint(failing, shard_bytes, error, tmp_path, monkeypatch):
    before = tiny()
    save(before, tmp_path, max_shard_bytes=shard_bytes, dtype=torch.float32)
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    after = tiny()
    with torch.no_grad():
        for p in after.parameters():
            p.add_(1)
    real, calls = weights_module.save_file, []
    last = len([f for f in files if f.startswith("model") and f.endswith("safetensors")])

    def failing_save(tensors, path, **options):
        calls.append(path)
        if failing == "first shard" or (failing == "last shard" and len(calls) == last):
            real(dict(list(tensors.items())[:1]), path, **options)  # a part of it is on disk
            raise error
        real(tensors, path, **options)

    def refuse(*_args, **_options):
        raise error

    monkeypatch.setattr(weights_module, "save_file", failing_save)
    if failing == "config":
        monkeypatch.setattr(K3Config, "to_json", refuse)
    if failing == "index":
        monkeypatch.setattr(weights_module.json, "dumps", refuse)
    with pytest.raises(type(error)):
        save(after, tmp_path, max_shard_bytes=shard_bytes, dtype=torch.float32)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files, "not a byte, and nothing left behind"
    again = load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), again.parameters()))


def test_a_save_cut_off_between_renames_is_never_a_mixture(tmp_path, monkeypatch):
    """Shards are renamed one by one; a checkpoint of half new and half old shards must not load."""
    save(tiny(), tmp_path, max_shard_bytes=200_000)
    real, renamed = os.replace, []

    def failing_replace(source, destination):
        if len(renamed) == 2:
            raise OSError("power cut")
        renamed.append(destination)
        real(source, destination)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="power cut"):
        save(tiny(num_experts_per_token=3), tmp_path, max_shard_bytes=200_000)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        load(tmp_path)


def test_a_temporary_folder_of_a_killed_save_does_no_harm(tmp_path):
    save(tiny(), tmp_path)
    (tmp_path / ".saving-abc").mkdir()
    (tmp_path / ".saving-abc" / "model.safetensors").write_bytes(b"half")
    load(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": "int4"}, "experts is 'int4'; allowed: 'mxfp4' or 'bf16'"),
        ({"dtype": torch.int8}, "dtype is torch.int8; allowed: bfloat16, float16, float32, float64"),
        ({"dtype": torch.uint8}, "dtype is torch.uint8; allowed"),
    ],
)
def test_what_cannot_be_saved_is_named(options, words, tmp_path):
    with pytest.raises(ValueError) as error:
        save(tiny(), tmp_path / "new", **options)
    assert words in str(error.value) and not (tmp_path / "new").exists()


def test_experts_that_do_not_fit_blocks_are_refused_before_anything_is_written(tmp_path):
    save(tiny(moe_intermediate_size=48), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="'moe_intermediate_size' is 48; with MXFP4 experts"):
        save(tiny(moe_intermediate_size=48), tmp_path, experts="mxfp4")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


# ------------------------------------------------------------------ what does not fit is refused


def changed(g, folder, change):
    """A copy of an official folder whose tensors went through `change`."""
    folder.mkdir(parents=True)
    shutil.copy(g.folder / "config.json", folder / "config.json")
    tensors = {name: tensor.clone() for name, tensor in g.stored.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_everything_that_misfits_is_named_in_one_error(golden, tmp_path):
    missing = ["language_model.model.norm.weight", "language_model.model.layers.1.self_attn.dt_bias"]
    missing += ["language_model.model.layers.3.block_sparse_moe.experts.2.w2.weight_scale"]
    extra = ["language_model.model.layers.1.self_attn.q_proj.bias", "model.mtp.weight"]
    shape = "language_model.lm_head.weight"
    dtype = "language_model.model.layers.3.block_sparse_moe.experts.1.w1.weight_packed"

    def change(tensors):
        for name in missing:
            del tensors[name]
        for name in extra:
            tensors[name] = torch.zeros(3)
        tensors[shape] = tensors[shape].T.contiguous()
        tensors[dtype] = tensors[dtype].float()

    with pytest.raises(ValueError) as error:
        load(changed(golden("f_k3_4l_small"), tmp_path / "x", change))
    message = str(error.value)
    assert str(tmp_path / "x") in message and "does not fit its config.json" in message
    assert "3 missing: " in message and "2 unknown: " in message and "2 misshapen: " in message
    for name in missing + extra:
        assert name in message
    assert f"{shape} is BF16 [60, 128], expected BF16 [128, 60]" in message
    assert f"{dtype} is F32 [" in message and "expected U8 [" in message


def test_item_03_zero_based_layer_lists_do_not_find_their_tensors(golden, tmp_path):
    """Item 3, at the loader: lists read as 0-based ask for the wrong kind of attention and are refused by name."""
    g = golden("a_k3_13l")
    cfg = replace(g.config, full_attn_layers=(5, 9, 13), kda_layers=(1, 2, 3, 4, 6, 7, 8, 10, 11, 12))
    shutil.copytree(g.folder, tmp_path / "x")
    os.chmod(tmp_path / "x" / "config.json", 0o644)
    cfg.to_json(tmp_path / "x" / "config.json")
    with pytest.raises(ValueError) as error:
        load(tmp_path / "x")
    assert "layers.4.self_attn.kv_a_proj_with_mqa.weight" in str(error.value)
    assert "layers.3.self_attn.A_log" in str(error.value)


def test_a_very_long_list_is_shortened(golden, tmp_path):
    g = golden("a_k3_13l")
    with pytest.raises(ValueError) as error:
        load(changed(g, tmp_path / "x", lambda t: [t.pop(n) for n in list(t)[3:]]))
    assert "and " in str(error.value) and " more" in str(error.value)
    assert len(str(error.value)) < 40_000


def folder_of(model, path, **options):
    save(model, path, **options)
    return path


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder; expected a checkpoint"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load(tmp_path)
    K3Config.tiny().to_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        load(tmp_path)
    folder = folder_of(tiny(), tmp_path / "whole", max_shard_bytes=200_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    for shard in shards[1:3]:
        shard.unlink()
    with pytest.raises(ValueError) as error:
        load(folder)
    assert f"shards named in model.safetensors.index.json are missing: {shards[1].name}, {shards[2].name}" in str(
        error.value
    )


def test_a_tensor_promised_by_the_index_but_not_in_its_shard(tmp_path):
    folder = folder_of(tiny(), tmp_path / "x", max_shard_bytes=200_000)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors or {"x": torch.zeros(1)}, shard)
    with pytest.raises(ValueError) as error:
        load(folder)
    assert f"{shard}: tensors promised by model.safetensors.index.json are missing: {name}" in str(error.value)


@pytest.mark.parametrize("index", ["", "{", "[]", '{"weights": 1}', '{"weight_map": 3}', "null", '{"weight_map": [1]}'])
def test_an_index_that_is_none(index, tmp_path):
    folder = folder_of(tiny(), tmp_path / "x", max_shard_bytes=200_000)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: not a safetensors index"):
        load(folder)


@pytest.mark.parametrize(
    "shard", [3, None, ["x"], {}, "", ".", "..", "../x/a", "/etc/hosts", "a/b", "a\0", "a" * 300], ids=repr
)
def test_an_index_may_name_files_of_its_folder_only(shard, tmp_path):
    folder = folder_of(tiny(), tmp_path / "x", max_shard_bytes=200_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = list(content["weight_map"])[3]
    content["weight_map"][name] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        load(folder)
    assert f"{index}: weight_map gives {shard!r} for {name!r}" in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for(name, kind, tmp_path):
    folder = folder_of(tiny(), tmp_path / "x")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}: not a "):
        load(folder)


def test_an_index_nested_without_end_is_named(tmp_path):
    folder = folder_of(tiny(), tmp_path / "x")
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: not a safetensors index"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 9, 1000, -1, -1000])
def test_a_truncated_file_is_named(keep, tmp_path):
    folder = folder_of(tiny(), tmp_path / "x")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*(truncated|not a safetensors file)"):
        load(folder)


def with_header(path, header, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xff",
        b"not json",
        [],
        {"a": 3},
        {"a": {}},
        {"a": ENTRY | {"data_offsets": [0]}},
        {"a": ENTRY | {"data_offsets": [0, 20]}},
        {"a": ENTRY | {"data_offsets": [24, 0]}},
        {"a": ENTRY | {"data_offsets": [-8, 16]}},
        {"a": ENTRY | {"data_offsets": ["0", "24"]}},
        {"a": ENTRY | {"data_offsets": [0.0, 24.0]}},
        {"a": ENTRY | {"data_offsets": [False, 24]}},
        {"a": ENTRY | {"shape": [2.0, 3]}},
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        {"a": ENTRY | {"shape": [2, 4]}},
        {"a": ENTRY | {"shape": 6}},
        {"a": ENTRY | {"shape": [2, "3"]}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_wrong_header_is_named(header, tmp_path):
    path = with_header(tmp_path / "x.safetensors", header)
    with pytest.raises(ValueError, match=r"x\.safetensors: "):
        read_header(path)


def test_a_header_is_read_as_it_is(tmp_path):
    path = with_header(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, "a": ENTRY})
    entries = read_header(path)
    assert list(entries) == ["a"] and entries["a"].shape == (2, 3) and entries["a"].nbytes == 24
    text = path.read_bytes()
    assert entries["a"].offset == 8 + int.from_bytes(text[:8], "little")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_dtype_of_another_kind_is_named(golden, tmp_path, dtype):
    name = "language_model.model.norm.weight"
    folder = changed(golden("c1_k3_1l_kda"), tmp_path / "x", lambda t: t.__setitem__(name, t[name].to(dtype)))
    with pytest.raises(ValueError, match=r"1 misshapen: language_model\.model\.norm\.weight is (I64|F8_E4M3) \[56\]"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_a_dtype_that_is_no_float_is_refused(golden, dtype):
    with pytest.raises(ValueError, match=f"dtype is {dtype}; allowed: a floating-point dtype or None"):
        golden("c1_k3_1l_kda").load(dtype)


def test_another_stored_precision_is_converted(golden, tmp_path):
    """A checkpoint saved in float32 throughout loads too; shapes decide, not the stored float."""
    g = golden("c1_k3_1l_kda")

    def widen(tensors):
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                tensors[name] = tensor.float()

    model = load(changed(g, tmp_path / "x", widen), dtype=torch.float64)
    with torch.no_grad():
        assert (model(g.ids("len017")).logits[0] - g.expected["len017.logits"]).abs().max() < 1e-9


def test_packed_experts_need_no_quantization_section(golden, tmp_path):
    """The presence of weight_packed decides, not the config (architecture 1.5)."""
    g = golden("c2_k3_1l_mla")
    folder = changed(g, tmp_path / "x", lambda t: None)
    os.chmod(folder / "config.json", 0o644)
    with_expert_format(g.config, None).to_json(folder / "config.json")
    with torch.no_grad():
        logits = load(folder, dtype=torch.float64)(g.ids("len017")).logits[0]
    assert (logits - g.expected["len017.logits"]).abs().max() < 1e-9


def test_loading_copies_nothing_back_into_the_file(golden, tmp_path):
    g = golden("c1_k3_1l_kda")
    folder = changed(g, tmp_path / "x", lambda t: None)
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not torch.equal(load(folder).lm_head.weight, model.lm_head.weight)


# ------------------------------------------------------------------ memory

MEASURE = """
import sys, resource
import nanok3
from nanok3.model.weights import load
load(sys.argv[2])  # a first, tiny load: what is imported or allocated once is no part of the measurement
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
model = load(sys.argv[1])
# not ru_maxrss: that starts with what the parent held
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(peak - before, sum(t.nbytes for t in model.state_dict().values()))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size where Linux keeps it")
@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_loading_needs_little_more_than_the_checkpoint(experts, golden, tmp_path):
    """Peak resident memory grows by at most 1.2 times the folder, measured in a process of its own."""
    cfg = K3Config.tiny(
        num_hidden_layers=3, full_attn_layers=(3,), kda_layers=(1, 2), hidden_size=1024, vocab_size=16384,
        moe_intermediate_size=1024, routed_expert_hidden_size=1024, num_experts=24 if experts == "mxfp4" else 7,
    )  # fmt: skip
    cfg = with_expert_format(cfg, experts)
    specs = disk_tensors(cfg)
    kinds = weights_module.DTYPES
    tensors = {name: torch.zeros(spec.shape, dtype=kinds[spec.dtype]) for name, spec in specs.items()}
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    cfg.to_json(tmp_path / "config.json")
    size = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert 150e6 < size < 220e6
    del tensors
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(golden("c1_k3_1l_kda").folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    growth, held = map(int, result.stdout.split())
    assert held > 0.99 * size * 0.98, "everything was loaded"
    assert growth < 1.2 * size
