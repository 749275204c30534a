"""The ledger against what it describes: the release's totals, the book's numbers, the checkpoint layout, the model's
own tensors, torch's operation counter, and the memory a forward really keeps."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storages import Storages
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanok3 import ledger, ops
from nanok3.config import K3Config, with_expert_format
from nanok3.kernels import kda_cpu, native, rows
from nanok3.ledger import EMBEDDING, HEAD, KDA, MLA, PROJECTOR, ROUTED, VISION
from nanok3.model import decoder, kda
from nanok3.model.decoder import K3
from nanok3.model.weights import disk_tensors, save
from nanok3.train.recompute import recompute_activations

FIXTURE_NAMES = ["a_k3_13l", "b_k3_7l", "c1_k3_1l_kda", "c2_k3_1l_mla", "d_kimi_linear_6l", "e_k3_5l_realheads"]


def of_component(cfg: K3Config, component: str) -> int:
    return sum(w.parameters for w in ledger.weights(cfg) if w.component == component)


# ---------------------------------------------------------------------- the release


def test_release_totals():
    cfg = K3Config.k3()
    assert ledger.parameters(cfg) == 2_779_931_834_976
    assert ledger.checkpoint_bytes(cfg) == 1_560_860_324_864
    assert ledger.checkpoint_tensors(cfg) == 497_220
    assert round(ledger.active_parameters(cfg) / 1e9, 2) == 104.19
    assert round(ledger.active_parameters(cfg, embedding=True) / 1e9, 2) == 105.36


def test_release_components():
    cfg = K3Config.k3()
    assert of_component(cfg, ROUTED) == 92 * 896 * 33_030_144 == 2_722_740_830_208
    assert of_component(cfg, KDA) == 69 * 443_740_384
    assert of_component(cfg, MLA) == 24 * 232_196_096
    assert of_component(cfg, EMBEDDING) == of_component(cfg, HEAD) == 1_174_405_120
    assert of_component(cfg, VISION) == 401_214_464
    assert of_component(cfg, PROJECTOR) == 46_144_512


def test_the_books_derived_numbers():
    cfg = K3Config.k3()
    assert ledger.recurrent_values(cfg) == 1_572_864
    assert 2 * ledger.recurrent_values(cfg) == 3 * 2**20  # 3 MiB a layer in bfloat16
    assert 2 * 69 * ledger.recurrent_values(cfg) == 207 * 2**20
    assert 4 * 69 * ledger.recurrent_values(cfg) == 414 * 2**20 == 434_110_464
    assert 2 * 69 * ledger.convolution_values(cfg) == 15_261_696
    assert cfg.latent_cache_size == 576
    assert ledger.expanded_values(cfg) == 30_720
    assert ledger.latent_bytes(cfg) == 27_648
    assert 24 * 2 * ledger.expanded_values(cfg) == 1_474_560
    assert ledger.depth_sources(cfg) == 9
    expert = next(w for w in ledger.weights(cfg) if w.component == ROUTED)
    assert 3 * expert.shape[0] * expert.shape[1] == 33_030_144


def test_release_expert_bytes():
    cfg = K3Config.k3()
    experts = [w for w in ledger.weights(cfg) if w.component == ROUTED]
    packed, plain = ledger.stored_precision(cfg), ledger.Precision("bf16", 2, False)
    assert sum(packed.nbytes(w) for w in experts) == 92 * 896 * 17_547_264
    assert sum(plain.nbytes(w) for w in experts) == 2 * 2_722_740_830_208


# ---------------------------------------------------------------------- the checkpoint layout


def promised(cfg: K3Config) -> Counter:
    """(name, shape on disk) with numbers replaced, and how often."""
    stored = ledger.stored_precision(cfg)
    names: Counter = Counter()
    for w in ledger.weights(cfg):
        if stored.packs(w):
            names[f"{w.name}_packed", (w.shape[0], w.shape[1] // 2)] += w.copies
            names[f"{w.name}_scale", (w.shape[0], w.shape[1] // 32)] += w.copies
        else:
            names[w.name, w.disk_shape or w.shape] += w.copies
    return names


def check_layout(cfg: K3Config) -> None:
    on_disk = disk_tensors(cfg)
    starred = Counter((re.sub(r"\b(layers|blocks|experts)\.\d+\.", r"\1.*.", n), t.shape) for n, t in on_disk.items())
    assert starred == promised(cfg)
    assert ledger.checkpoint_tensors(cfg) == len(on_disk)
    assert ledger.checkpoint_bytes(cfg) == sum(t.nbytes for t in on_disk.values())


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_layout_of_fixtures(golden, name):
    check_layout(golden(name).config)


VARIANTS = {
    "no shared experts": {"num_shared_experts": 0},
    "no latent": {"routed_expert_hidden_size": None},
    "no latent norm": {"latent_moe_use_norm": False},
    "two dense layers": {"first_k_dense_replace": 2},
    "every other layer dense": {"moe_layer_freq": 2},
    "low-rank gate": {"use_full_rank_gate": False},
    "no query bottleneck": {"q_lora_rank": None},
    "no MLA gate": {"mla_use_output_gate": False},
    "only KDA": {"kda_layers": (1, 2, 3, 4, 5), "full_attn_layers": ()},
    "full depth attention": {"attn_res_full": True},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_layout_of_variants(changes):
    check_layout(K3Config.tiny(**changes))


@pytest.mark.parametrize("cfg", [K3Config.small(), with_expert_format(K3Config.tiny(), "mxfp4")])
def test_layout_of_presets(cfg):
    check_layout(cfg)


@pytest.mark.slow
def test_layout_of_the_release():
    check_layout(K3Config.k3())


@pytest.mark.parametrize("depth", [1, 2, 7, 12, 24])
def test_parameters_over_the_family(depth):
    for cfg in (K3Config.small().at_depth(depth), K3Config.k3().at_depth(depth)):
        with torch.device("meta"):
            model = K3(cfg)
        assert ledger.parameters(cfg) == sum(value.numel() for value in model.state_dict().values())


def test_layers_and_ends_make_the_whole(golden):
    cfg = golden("a_k3_13l").config
    layers = sum(w.parameters for l in range(13) for w in ledger.layer_weights(cfg, l))
    ends = sum(w.parameters for w in ledger.weights(cfg) if ".layers." not in w.name)
    assert layers + ends == ledger.parameters(cfg)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bytes_of_a_saved_checkpoint(tmp_path, dtype):
    model = K3(K3Config.tiny())
    save(model, tmp_path, dtype=dtype)
    cfg = K3Config.from_json(tmp_path)
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (tmp_path / "model.safetensors").stat().st_size - 8 - header == ledger.checkpoint_bytes(cfg)


def test_a_dtype_that_checkpoints_do_not_have():
    cfg = K3Config.tiny()
    object.__setattr__(cfg, "dtype", "int8")
    with pytest.raises(ValueError, match="'dtype' is 'int8'; allowed: bfloat16"):
        ledger.stored_precision(cfg)


# ---------------------------------------------------------------------- arithmetic


def counted(function) -> int:
    """Operations of matrix products. Attention runs in its plain form, which the counter can see into."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def claimed(cfg: K3Config, tokens: int) -> float:
    """What the counter can see of a forward. It counts attention over the whole square of scores and over values padded
    to the width of the keys; the ledger only scores that are used, (T + 1) / 2 of T on average, and no padding."""
    flops = ledger.prefill_flops(cfg, tokens)
    padded = 2 * cfg.qk_head_dim / (cfg.qk_head_dim + cfg.v_head_dim)
    return tokens * (flops.matrices + flops.kda + flops.mla * padded * 2 * tokens / (tokens + 1))


@pytest.mark.parametrize("cfg", [K3Config.tiny(), K3Config.small()], ids=["tiny", "small"])
def test_forward_flops(cfg):
    model, tokens = K3(cfg).double(), 64  # float64 runs on torch operations that the counter knows
    ids = torch.randint(cfg.vocab_size, (1, tokens))
    with torch.no_grad():
        assert counted(lambda: model(ids)) == pytest.approx(claimed(cfg, tokens), rel=0.002)


def test_forward_flops_of_kimi_linear(golden):
    fixture = golden("d_kimi_linear_6l")
    ids = torch.randint(fixture.config.vocab_size, (1, 32))
    with torch.no_grad():
        measured = counted(lambda: fixture.model(ids))
    assert measured == pytest.approx(claimed(fixture.config, 32), rel=0.005)


def test_training_flops():
    cfg, tokens = K3Config.tiny(), 64
    model = K3(cfg).double()
    ids = torch.randint(cfg.vocab_size, (1, tokens))
    measured = counted(lambda: model(ids).logits.sum().backward())
    assert measured == pytest.approx(3 * claimed(cfg, tokens), rel=0.02)
    assert ledger.flops_per_token(cfg, tokens, training=True) == 3 * ledger.flops_per_token(cfg, tokens)


def only_mla() -> K3Config:
    return K3Config.tiny(num_hidden_layers=2, kda_layers=(), full_attn_layers=(1, 2))


def test_decode_flops_of_absorbed_attention():
    cfg, context = only_mla(), 40
    model = K3(cfg).double()
    state = model.new_state(1)
    with torch.no_grad():
        model(torch.randint(cfg.vocab_size, (1, context - 1)), state=state)
        measured = counted(lambda: model(torch.randint(cfg.vocab_size, (1, 1)), state=state))
    flops = ledger.decode_flops(cfg, context)
    assert flops.kda == 0
    assert measured == pytest.approx(flops.matrices + flops.mla, rel=0.005)


def test_decode_flops_of_kda():
    """The counter sees compare and read, two products of K x V; retain and write are elementwise to it."""
    cfg = K3Config.tiny()
    H, K, layers = cfg.kda_num_heads, cfg.kda_head_dim, cfg.kinds.count("kda")
    q, k, v, g = (torch.rand(1, 1, H, K) for _ in range(4))
    measured = counted(lambda: ops.kda(q, k, v, -g, torch.rand(1, 1, H), backend="reference"))
    assert ledger.decode_flops(cfg, 1).kda == layers * (measured + H * (2 * K * K + K * K))


def test_prefill_is_the_mean_of_decode_where_attention_is_expanded():
    cfg = K3Config.small()
    each = [ledger.decode_flops(cfg, n, absorbed=False).mla for n in range(1, 33)]
    assert ledger.prefill_flops(cfg, 32).mla == pytest.approx(sum(each) / 32)


def test_vision_flops(golden):
    model = golden("a_k3_13l").model
    cfg = golden("a_k3_13l").config
    rows, columns = 4, 6
    pixels = torch.rand(rows * columns, 3, cfg.patch_size, cfg.patch_size, dtype=torch.float64)
    grid = torch.tensor([[1, rows, columns]])
    with torch.no_grad():
        measured = counted(lambda: model.vision(pixels, grid))
    assert measured == pytest.approx(ledger.vision_flops(cfg, rows * columns), rel=1e-6)
    with pytest.raises(ValueError, match="no vision tower"):
        ledger.vision_flops(K3Config.tiny(), 4)


def test_constants_are_the_models():
    assert ledger.KDA_CHUNK == kda.CHUNK
    assert ledger.KDA_TOKENS_PER_STATE == kda_cpu.TOKENS_PER_STATE


@pytest.mark.parametrize(
    "cfg",
    [
        K3Config.tiny(),
        K3Config.small(),
        K3Config.small(attn_res_block_size=4),
        K3Config.tiny(attn_res_full=True),
        K3Config.tiny(model_type="kimi_linear", attn_res_block_size=None),
    ],
)
def test_depth_reads(monkeypatch, cfg):
    seen = []
    mix = decoder.mix
    monkeypatch.setattr(decoder, "mix", lambda sources, *rest: seen.append(len(sources)) or mix(sources, *rest))
    K3(cfg)(torch.zeros(1, 3, dtype=torch.int64))
    assert ledger.depth_reads(cfg) == seen
    assert ledger.depth_sources(cfg) == (seen[-1] if seen else 1)


# ---------------------------------------------------------------------- what a sequence leaves, what a forward keeps


@pytest.mark.parametrize("cfg", [K3Config.tiny(), K3Config.small(), only_mla()])
def test_state_bytes(cfg):
    model = K3(cfg)
    state = model.new_state(2)
    with torch.no_grad():
        model(torch.randint(cfg.vocab_size, (2, 7)), state=state)
    assert state.nbytes == 2 * ledger.state_bytes(cfg, 7, plain=4)
    model.compute_dtype = torch.bfloat16
    state = model.new_state(2)
    with torch.no_grad():
        model(torch.randint(cfg.vocab_size, (2, 7)), state=state)
    assert state.nbytes == 2 * ledger.state_bytes(cfg, 7, plain=2)


def kept_bytes(cfg: K3Config, tokens: int, dtype: torch.dtype, recompute: bool = False) -> int:
    """What is alive after a forward, its result included."""
    model = K3(cfg)
    model.compute_dtype = dtype
    if recompute:
        recompute_activations(model)
    with Storages() as made:
        hidden = model.hidden_states(torch.randint(cfg.vocab_size, (1, tokens)))
    assert hidden.requires_grad
    return made.alive


def kept_a_token(*arguments) -> float:
    """The growth from 128 to 320 tokens, two multiples of what KDA cuts them into; copies of weights drop out."""
    cfg, *rest = arguments
    return (kept_bytes(cfg, 320, *rest) - kept_bytes(cfg, 128, *rest)) / 192


KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "gate_lower_bound": None,
    "use_full_rank_gate": False,
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
}
KEPT = {
    "tiny": K3Config.tiny(),
    "small": K3Config.small(),
    "one width": K3Config.tiny(v_head_dim=48),
    "Kimi Linear": K3Config.tiny(**KIMI_LINEAR),
    "Kimi Linear, one width": K3Config.tiny(**KIMI_LINEAR, v_head_dim=48),
    "plain mixture weights": K3Config.tiny(moe_renormalize=False),
    **{name: K3Config.tiny(**changes) for name, changes in VARIANTS.items()},
}
PRECISIONS = [(torch.bfloat16, 2), (torch.float32, 4)]
with_kernels = pytest.mark.skipif(
    not all(native.available(name) for name in ("kda", "situ", "attn_res", "norms", "short_conv", "attention")),
    reason="the forms in torch keep more than the kernels",
)


@with_kernels
@pytest.mark.parametrize("dtype, plain", PRECISIONS)
@pytest.mark.parametrize("cfg", KEPT.values(), ids=KEPT.keys())
def test_activation_bytes(unchecked, cfg, dtype, plain):
    assert kept_a_token(cfg, dtype) == ledger.activation_bytes(cfg, plain)


@with_kernels
@pytest.mark.parametrize("dtype, plain", PRECISIONS)
@pytest.mark.parametrize("name", ["tiny", "small", "full depth attention", "Kimi Linear"])
def test_activation_bytes_with_recomputation(unchecked, name, dtype, plain):
    cfg = KEPT[name]
    again = max(max(ledger.layer_activations(cfg, l, plain)) for l in range(cfg.num_hidden_layers))
    assert kept_a_token(cfg, dtype, True) == ledger.activation_bytes(cfg, plain, recompute=True) - again


@with_kernels
@pytest.mark.parametrize("dtype, plain", PRECISIONS)
@pytest.mark.parametrize("layer", [0, 1, 3])  # KDA and dense, KDA and experts, MLA and experts
def test_halves_of_a_layer(unchecked, layer, dtype, plain):
    cfg = K3Config.tiny()
    module = K3(cfg).model.layers[layer]

    def kept(half, tokens: int) -> int:
        h = torch.randn(1, tokens, cfg.hidden_size, dtype=dtype, requires_grad=True)
        with Storages() as made:
            out = half(h)
        return made.alive - out.nbytes  # which the backward does not need

    grown = tuple((kept(half, 320) - kept(half, 128)) / 192 for half in (module.attend, module.feed))
    assert grown == ledger.layer_activations(cfg, layer, plain)


@with_kernels
@pytest.mark.parametrize("dtype, plain", PRECISIONS)
def test_forms_in_torch_keep_more(unchecked, monkeypatch, dtype, plain):
    for module in (rows, kda_cpu):
        monkeypatch.setattr(module, "_built", lambda *_: False)
    cfg = K3Config.small()
    assert 1.3 < kept_a_token(cfg, dtype) / ledger.activation_bytes(cfg, plain) < 1.9


# ---------------------------------------------------------------------- numbers as people write them


@pytest.mark.parametrize(
    "text, value",
    [
        ("4096", 4096),
        ("4,096", 4096),
        ("1_000", 1000),
        ("128K", 131072),
        ("128k", 131072),
        ("1M", 2**20),
        ("1.5K", 1536),
    ],
)
def test_counts(text, value):
    assert ledger.parse_count("context", text) == value
    assert ledger.parse_count("context", value) == value


@pytest.mark.parametrize(
    "text, value",
    [("192GiB", 192 * 2**30), ("80GB", 80 * 10**9), ("80 gb", 80 * 10**9), ("1.5TiB", 3 * 2**39), ("512B", 512)],
)
def test_sizes(text, value):
    assert ledger.parse_bytes("memory", text) == value


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5", "1G", "4K4", "nan", "1e6", "1M tokens"])
def test_counts_that_are_none(text):
    with pytest.raises(ValueError, match=f"context is {re.escape(repr(text))}; allowed: a whole number"):
        ledger.parse_count("context", text)


@pytest.mark.parametrize("text", ["", "192", "80G", "GiB", "0GiB", "0.5B", "-1GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match=f"memory is {re.escape(repr(text))}; allowed: a number with a unit"):
        ledger.parse_bytes("memory", text)


@given(st.integers(1, 2**40))
def test_counts_come_back(tokens):
    assert ledger.parse_count("context", ledger.as_count(tokens)) == tokens


@pytest.mark.parametrize(
    "text, expected",
    [
        (ledger.scaled(104_189_612_640), "104.2 B"),
        (ledger.scaled(2_779_931_834_976), "2.78 T"),
        (ledger.scaled(12), "12"),
        (ledger.scaled(999_999), "1 M"),
        (ledger.binary_bytes(434_110_464), "414 MiB"),
        (ledger.binary_bytes(1023), "1,023 B"),
        (ledger.binary_bytes(2**40), "1 TiB"),
        (ledger.decimal_bytes(1_560_860_324_864), "1.561 TB"),
        (ledger.decimal_bytes(999), "999 B"),
    ],
)
def test_written_numbers(text, expected):
    assert text == expected


# ---------------------------------------------------------------------- which config a user means


def test_presets():
    assert ledger.find_config("k3") == (K3Config.k3(), None)
    assert ledger.find_config("small@12")[0] == K3Config.small().at_depth(12)


def test_folders_and_runs(tmp_path):
    run = tmp_path / "run"
    for place, layers in (("checkpoints/step-9/model", 3), ("checkpoints/step-10/model", 4)):
        (run / place).mkdir(parents=True)
        K3Config.tiny().at_depth(layers).to_json(run / place / "config.json")
    assert ledger.find_config(str(run)) == (K3Config.tiny().at_depth(4), run / "checkpoints/step-10/model")
    K3Config.tiny().to_json(run / "model" / "config.json")
    assert ledger.find_config(str(run)) == (K3Config.tiny(), run / "model")
    assert ledger.find_config(str(run / "model/config.json")) == (K3Config.tiny(), run / "model")
    assert ledger.find_config(str(run / "checkpoints/step-9/model"))[0].num_hidden_layers == 3


@pytest.mark.parametrize("target", ["large", "runs/nothing", "tiny@", "tiny@-1", "tiny@many", "tiny@0"])
def test_configs_that_are_none(target):
    with pytest.raises(ValueError, match=r"allowed|at_depth|after @"):
        ledger.find_config(target)


def test_imports_only_configs():
    source = Path(inspect.getfile(ledger)).read_text()
    modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {m for m in modules if m and m.startswith("nanok3")} == {"nanok3.config", "nanok3.official"}
    assert "torch" not in re.sub(r'""".*?"""|#.*', "", source, flags=re.DOTALL)
