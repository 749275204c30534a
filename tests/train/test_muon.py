from __future__ import annotations

import functools
import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from nanok3.baselines.gpt2 import GPT2, GPT2Config
from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.train.loss import count_targets, cross_entropy, step_loss
from nanok3.train.muon import K3Optimizer, OptimizerSettings, newton_schulz, parameter_rules, rules_table


def kimi_linear(**changes) -> K3Config:
    """The older relative: no query bottleneck, no latent, no attention residuals, low-rank KDA gate."""
    return K3Config.tiny(
        model_type="kimi_linear",
        q_lora_rank=None,
        mla_use_output_gate=False,
        use_full_rank_gate=False,
        routed_expert_hidden_size=None,
        latent_moe_use_norm=False,
        attn_res_block_size=None,
        **changes,
    )


def odd(**changes) -> K3Config:
    """Three layers (KDA, KDA, MLA) with no two sizes alike."""
    sizes = {"kda_num_heads": 3, "kda_head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"qk_nope_head_dim": 7, "qk_rope_head_dim": 3, "v_head_dim": 5, "q_lora_rank": 11, "kv_lora_rank": 13}
    sizes |= {"hidden_size": 24, "intermediate_size": 40, "num_experts": 5, "num_experts_per_token": 2}
    sizes |= {"moe_intermediate_size": 9, "routed_expert_hidden_size": 10, "vocab_size": 300}
    sizes |= {"bos_token_id": 44, "eos_token_id": 46, "pad_token_id": 299, "media_placeholder_token_id": 65}
    return replace(K3Config.tiny().at_depth(3), **(sizes | changes))


def with_gradients(cfg: K3Config, dtype=torch.float64, scale=1.0, seed=0) -> K3:
    torch.manual_seed(seed)
    model = K3(cfg).to(dtype)
    for p in model.parameters():
        p.grad = scale * torch.randn_like(p)
    return model


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------------- Newton-Schulz


def orthogonalise(N: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """One matrix, by the formula."""
    X = N / (N.norm() + 1e-7)
    X = X.T if N.shape[0] > N.shape[1] else X
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if N.shape[0] > N.shape[1] else X


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 1, 17), (3, 17, 1), (2, 15, 16), (5, 16, 15), (1, 65, 33), (4, 31, 31)]
)
def test_every_matrix_of_the_batch_follows_the_formula(shape):
    G = torch.randn(shape, dtype=torch.float64) * torch.logspace(-3, 3, shape[0], dtype=torch.float64)[:, None, None]
    want = torch.stack([orthogonalise(g) for g in G])
    torch.testing.assert_close(newton_schulz(G), want, rtol=1e-11, atol=1e-12)
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        got = newton_schulz(G.float(), dtype=dtype)
        assert got.dtype == torch.float32
        assert (got - want).norm() <= error * want.norm()


def test_singular_values_come_out_near_one():
    G = torch.randn(6, 40, 64)
    singular = torch.linalg.svdvals(newton_schulz(G, dtype=torch.float32))
    assert singular.min() > 0.6 and singular.max() < 1.25
    assert (torch.linalg.svdvals(newton_schulz(G)) - singular).abs().max() < 0.1  # in the machine's fast dtype


def test_more_matrices_than_fit_at_once_are_split(monkeypatch):
    G = torch.randn(7, 9, 12, dtype=torch.float64)
    whole = newton_schulz(G)
    monkeypatch.setattr("nanok3.train.muon._matrices_at_once", lambda X: 3)
    torch.testing.assert_close(newton_schulz(G), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_stays_zero_and_disturbs_no_other(dtype):
    G = torch.randn(4, 12, 20)
    alone = newton_schulz(G, dtype=dtype)
    for place in range(5):
        with_zero = torch.cat((G[:place], torch.zeros(1, 12, 20), G[place:]))
        got = newton_schulz(with_zero, dtype=dtype)
        assert not got[place].any()
        torch.testing.assert_close(torch.cat((got[:place], got[place + 1 :])), alone, rtol=0, atol=0)


def test_one_large_matrix_does_not_shrink_another():
    G = torch.randn(2, 12, 20, dtype=torch.float64)
    loud = torch.stack((G[0], 1e6 * G[1]))
    torch.testing.assert_close(newton_schulz(loud), newton_schulz(G), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- the map


@functools.cache
def on_meta(cfg: K3Config) -> K3:
    with torch.device("meta"):
        return K3(cfg)


FAMILY = [K3Config.tiny(), K3Config.small(), kimi_linear(), odd(), kimi_linear(num_shared_experts=0)]
FAMILY += [K3Config.tiny().at_depth(n) for n in (1, 2, 4, 7, 12)] + [K3Config.k3()]


@pytest.mark.parametrize("cfg", FAMILY, ids=lambda c: f"{c.model_type}-{c.num_hidden_layers}x{c.hidden_size}")
def test_every_parameter_of_the_family_has_exactly_one_rule(cfg):
    model = on_meta(cfg)
    rules = parameter_rules(model)
    assert [r.name for r in rules] == [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    for rule in rules:
        p = parameters[rule.name]
        assert (rule.kind == "muon") == bool(rule.blocks)
        if rule.kind == "muon":  # the matrices cover the parameter: nothing left out, nothing twice
            assert sum(n * r * c for n, r, c in rule.blocks) == p.numel()
        small = ("norm", "conv1d", "res_proj", "A_log", "dt_bias", "bias", "pos_emb", "embed_tokens", "lm_head")
        assert rule.weight_decay == (0.0 if any(word in rule.name for word in small) else 0.1), rule.name


def blocks_of(cfg: K3Config) -> dict[str, tuple]:
    return {r.name: r.blocks for r in parameter_rules(on_meta(cfg))}


def test_the_release_is_cut_as_the_report_says():
    blocks = blocks_of(K3Config.k3())
    kda, mla, moe = (f"model.layers.{l}" for l in (0, 3, 1))
    heads = ((96, 128, 7168),)
    assert all(blocks[f"{kda}.self_attn.{m}_proj.weight"] == heads for m in "qkvg")
    assert blocks[f"{kda}.self_attn.f_a_proj.weight"] == ((1, 128, 7168),)
    assert blocks[f"{kda}.self_attn.f_b_proj.weight"] == ((96, 128, 128),)
    assert blocks[f"{kda}.self_attn.o_proj.weight"] == ((1, 7168, 12288),)
    assert blocks[f"{mla}.self_attn.q_a_proj.weight"] == ((1, 1536, 7168),)
    assert blocks[f"{mla}.self_attn.q_b_proj.weight"] == ((96, 192, 1536),)
    assert blocks[f"{mla}.self_attn.kv_a_proj_with_mqa.weight"] == ((1, 512, 7168), (1, 64, 7168))
    assert blocks[f"{mla}.self_attn.kv_b_proj.weight"] == ((96, 128, 512), (96, 128, 512))
    assert blocks[f"{mla}.self_attn.g_proj.weight"] == heads
    assert blocks[f"{mla}.self_attn.o_proj.weight"] == ((1, 7168, 12288),)
    assert blocks[f"{kda}.mlp.up_proj.weight"] == ((1, 33792, 7168),)
    assert blocks[f"{moe}.block_sparse_moe.gate.weight"] == ((1, 896, 7168),)
    assert blocks[f"{moe}.block_sparse_moe.experts.w1"] == ((896, 3072, 3584),)
    assert blocks[f"{moe}.block_sparse_moe.experts.w2"] == ((896, 3584, 3072),)
    assert blocks[f"{moe}.block_sparse_moe.shared_experts.gate_proj.weight"] == ((1, 6144, 7168),)
    adamw = {re.sub(r"\d+", "*", name) for name, cut in blocks.items() if not cut}
    layer = "model.layers.*."
    assert {n for n in adamw if n.startswith(layer + "self_attn")} == {
        layer + f"self_attn.{m}"
        for m in ("A_log", "dt_bias", "b_proj.weight", "o_norm.weight", "q_a_layernorm.weight", "kv_a_layernorm.weight")
    } | {layer + f"self_attn.{m}_conv*d.weight" for m in "qkv"}
    assert not any(cut for name, cut in blocks.items() if name.startswith(("vision_tower", "mm_projector")))


def test_kimi_linear_is_cut_along_its_own_heads():
    cfg = kimi_linear()
    blocks = blocks_of(cfg)
    assert blocks["model.layers.3.self_attn.q_proj.weight"] == ((4, 48, 128),)  # MLA: nope + rope rows a head
    assert blocks["model.layers.0.self_attn.q_proj.weight"] == ((4, 32, 128),)
    assert blocks["model.layers.0.self_attn.g_a_proj.weight"] == ((1, 32, 128),)
    assert blocks["model.layers.0.self_attn.g_b_proj.weight"] == ((4, 32, 32),)


def test_a_name_outside_the_map_is_refused():
    model = K3(K3Config.tiny())
    model.model.layers[2].self_attn.register_parameter("temperature", nn.Parameter(torch.ones(4)))
    with pytest.raises(ValueError, match=r"model\.layers\.2\.self_attn\.temperature"):
        parameter_rules(model)


def test_a_name_of_the_other_attention_is_refused():
    model = K3(K3Config.tiny())
    model.model.layers[0].self_attn.register_parameter("kv_b_proj", nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.kv_b_proj"):
        parameter_rules(model)


def test_rows_that_do_not_divide_into_heads_are_refused():
    model = K3(K3Config.tiny())
    model.model.layers[1].self_attn.q_proj.weight = nn.Parameter(torch.ones(130, 128))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight' has 130 rows.*4 x \[32\] = 128"):
        parameter_rules(model)


def test_a_model_without_config_is_refused():
    with pytest.raises(ValueError, match=r"model\.cfg"):
        parameter_rules(nn.Linear(3, 3))


def test_a_shared_tensor_is_listed_once():
    model = K3(K3Config.tiny())
    model.lm_head.weight = model.model.embed_tokens.weight
    rules = parameter_rules(model)
    ids = [id(dict(model.named_parameters())[r.name]) for r in rules]
    assert len(set(ids)) == len(ids)
    assert [r.name for r in rules if "lm_head" in r.name] == []


def test_the_table_names_every_parameter_with_its_layers():
    rules = parameter_rules(K3(odd()))
    console = Console(width=200, file=io.StringIO())
    console.print(rules_table(rules))
    text = console.file.getvalue()
    assert f"{len(rules)} parameters" in text
    for rule in rules:
        assert re.sub(r"layers\.\d+", "layers.*", rule.name) in text
    row = next(line for line in text.splitlines() if "kv_b_proj" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == [
        "2",
        "[24, 13]",
        "muon",
        "2 x [7, 13] + 2 x [5, 13]",
        "0.1",
        "1",
    ]
    row = next(line for line in text.splitlines() if "A_log" in line)
    assert "0-1" in row and "adamw" in row


# ---------------------------------------------------------------------- the optimizer


class PlainOptimizer:
    """The rules once more, parameter by parameter and matrix by matrix, in the plainest code."""

    def __init__(self, model: K3, lr: float, wd: float = 0.1) -> None:
        self.model, self.lr, self.wd, self.t = model, lr, wd, 0
        self.m = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.v = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def slices(self, name: str) -> list[slice] | None:
        """Row ranges of the logical matrices; None for AdamW."""
        cfg, H = self.model.cfg, self.model.cfg.num_attention_heads
        part = name.split(".")[-2] if name.endswith("weight") else name.split(".")[-1]
        nope, rope, v = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        kda = "self_attn" in name and cfg.kinds[int(name.split(".")[2])] == "kda"
        heights: list[int] | None = None
        if kda and part in ("q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj"):
            heights = [cfg.kda_head_dim] * cfg.kda_num_heads
        elif part == "q_b_proj":
            heights = [nope + rope] * H
        elif part == "kv_b_proj":
            heights = [nope, v] * H
        elif part == "kv_a_proj_with_mqa":
            heights = [cfg.kv_lora_rank, rope]
        elif part == "g_proj":
            heights = [v] * H
        elif (
            part in ("f_a_proj", "q_a_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate")
            or "routed_expert_" in part
        ):
            heights = [self.model.get_parameter(name).shape[0]] if "norm" not in part else None
        if heights is None:
            return None
        ends = torch.tensor(heights).cumsum(0).tolist()
        return [slice(end - height, end) for end, height in zip(ends, heights, strict=True)]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for name, p in self.model.named_parameters():
            m, v, g = self.m[name], self.v[name], p.grad
            slices = self.slices(name)
            if slices is None and ".experts." in name:
                matrices = [(m[e], g[e], p[e]) for e in range(len(p))]
            elif slices is not None:
                matrices = [(m[s], g[s], p[s]) for s in slices]
            else:
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.95).add_(0.05 * g * g)
                p.mul_(1 - self.lr * (self.wd if "b_proj" in name else 0.0))
                p -= self.lr * (m / (1 - 0.9**self.t)) / ((v / (1 - 0.95**self.t)).sqrt() + 1e-8)
                continue
            for momentum, gradient, weight in matrices:
                momentum.mul_(0.95).add_(gradient)
                update = orthogonalise(gradient + 0.95 * momentum)
                weight.mul_(1 - self.lr * self.wd).sub_(self.lr * 0.2 * max(update.shape) ** 0.5 * update)


def test_equals_the_plain_rules_over_several_steps():
    model, plain = with_gradients(odd()), with_gradients(odd())
    fast, slow = K3Optimizer(model, lr=0.01), PlainOptimizer(plain, lr=0.01)
    for step in range(4):
        torch.manual_seed(step)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        fast.lr = slow.lr = 0.01 / (step + 1)
        fast.step()
        slow.step()
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_small_batches_give_the_same_update(monkeypatch):
    model, other = with_gradients(odd()), with_gradients(odd())
    K3Optimizer(model).step()
    monkeypatch.setattr(K3Optimizer, "BATCH", 1)
    K3Optimizer(other).step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_a_weak_head_moves_as_much_as_a_strong_one():
    """The mechanism of per-head Muon: one head's gradient is a thousand times another's, the updates are alike."""
    model = with_gradients(odd())
    q = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    q.grad[:8] *= 1000
    before = q.detach().clone()
    K3Optimizer(model, weight_decay=0.0).step()
    moved = (q.detach() - before).view(3, 8, -1).norm(dim=(1, 2))
    assert moved.max() < 1.2 * moved.min()
    whole = orthogonalise(q.grad).view(3, 8, -1).norm(dim=(1, 2))
    assert whole.max() > 5 * whole.min()


def test_update_size_is_that_of_adamw():
    model = with_gradients(odd())
    before = snapshot(model)
    optimizer = K3Optimizer(model, lr=0.5, weight_decay=0.0)
    optimizer.step()
    for rule in optimizer.rules:
        if rule.kind == "muon":
            for new, old in zip(
                rule.cut(model.get_parameter(rule.name).data), rule.cut(before[rule.name]), strict=True
            ):
                rank = min(new.shape[1:])
                rms = ((new - old) / 0.5).square().mean().sqrt()
                assert 0.6 * 0.2 < rms < 1.25 * 0.2 or rank == 1


def test_zero_gradient_decays_matrices_and_nothing_else():
    model = with_gradients(odd(), torch.float32, scale=0.0)
    before = snapshot(model)
    optimizer = K3Optimizer(model, lr=0.5)
    optimizer.step()
    for rule in optimizer.rules:
        p, old = model.get_parameter(rule.name).detach(), before[rule.name]
        want = old * (1 - 0.5 * 0.1) if rule.weight_decay else old
        torch.testing.assert_close(p, want, rtol=1e-6 if rule.weight_decay else 0, atol=0)
    kept = {rule.name.split(".", 3)[-1] for rule in optimizer.rules if not rule.weight_decay}
    assert {"self_attn.A_log", "self_attn.dt_bias", "self_attn.q_conv1d.weight", "mlp_res_proj.weight"} <= kept


def test_an_expert_without_tokens_stays_and_leaves_the_others_alone():
    model, other = with_gradients(odd()), with_gradients(odd())
    name = "model.layers.1.block_sparse_moe.experts.w2"
    model.get_parameter(name).grad[3] = 0
    before = model.get_parameter(name).detach().clone()
    for m in (model, other):
        K3Optimizer(m, weight_decay=0.0).step()
    got, want = model.get_parameter(name), other.get_parameter(name)
    torch.testing.assert_close(got[3], before[3], rtol=0, atol=0)
    rest = [0, 1, 2, 4]
    torch.testing.assert_close(got[rest], want[rest], rtol=0, atol=0)
    assert not torch.equal(got[0], before[0])


def test_parameters_without_gradient_are_left_alone():
    model = with_gradients(odd(), torch.float32)
    frozen = [n for n, _ in model.named_parameters() if "layers.1." in n or "lm_head" in n]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False).grad = None
    before = snapshot(model)
    optimizer = K3Optimizer(model)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in frozen), name
    assert not any(key.startswith(tuple(f"{n}." for n in frozen)) for key in optimizer.state_dict())


def test_matrices_orthogonalised_are_those_of_the_map_once_a_step():
    model = with_gradients(odd())
    optimizer = K3Optimizer(model)
    matrices = sum(n for rule in optimizer.rules for n, _, _ in rule.blocks)
    for steps in (1, 2, 3):
        optimizer.step()
        assert optimizer.orthogonalised == steps * matrices


def test_learning_rate_scales_of_the_adamw_part():
    model = with_gradients(odd())
    before = snapshot(model)
    settings = OptimizerSettings(lr=0.1, adam_lr_scale=0.5, embedding_lr_scale=4.0, head_lr_scale=0.1)
    K3Optimizer(model, settings).step()
    # The first AdamW step moves every entry by its learning rate.
    for name, lr in (("model.embed_tokens.weight", 0.2), ("lm_head.weight", 0.005), ("model.norm.weight", 0.05)):
        moved = (model.get_parameter(name).detach() - before[name]).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, lr), rtol=1e-3, atol=0)


def test_embedding_decay_is_a_setting():
    rules = {r.name: r for r in parameter_rules(K3(odd()), OptimizerSettings(embedding_weight_decay=0.02))}
    assert rules["model.embed_tokens.weight"].weight_decay == rules["lm_head.weight"].weight_decay == 0.02
    assert rules["model.norm.weight"].weight_decay == 0.0


def train(model: K3, optimizer: K3Optimizer, steps: range, microbatches: int = 1) -> None:
    for step in steps:
        ids = torch.randint(0, 300, (8, 12), generator=torch.Generator().manual_seed(step))
        targets = ids.roll(-1, 1)
        targets[:, -1] = -100
        targets[0, 3:] = -100
        for x, y in zip(ids.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss, _ = cross_entropy(model.hidden_states(x), model.lm_head.weight, y)
            step_loss(loss, count_targets(targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    whole = K3(odd())
    first = K3(odd())
    first.load_state_dict(whole.state_dict())
    train(whole, K3Optimizer(whole), range(4))
    optimizer = K3Optimizer(first)
    train(first, optimizer, range(2))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")

    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second = K3(odd())
    second.load_state_dict(saved["model"])
    resumed = K3Optimizer(second)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, range(2, 4))
    for (name, a), b in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_loading_copies_and_replaces():
    model = with_gradients(odd())
    optimizer = K3Optimizer(model)
    optimizer.step()
    saved = {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}
    optimizer.load_state_dict(saved)
    optimizer.step()
    fresh = K3Optimizer(model)
    fresh.load_state_dict(saved)
    assert all(torch.equal(fresh.state_dict()[key], tensor) for key, tensor in saved.items())
    fresh.load_state_dict({})
    assert fresh.state_dict() == {}


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model.norm.weight.momentum", (24,)),
        ("model.layers.9.mlp.up_proj.weight.momentum", (2, 2)),
        ("lm_head.weight.exp_avg", (3, 3)),
        ("model.layers.0.mlp.up_proj.weight.momentum", (2, 2)),
    ],
)
def test_state_of_another_model_is_refused(key, shape):
    with pytest.raises(ValueError, match=re.escape(key)):
        K3Optimizer(K3(odd())).load_state_dict({key: torch.zeros(shape)})


def test_accumulation_does_not_change_the_step():
    torch.manual_seed(0)
    models = [K3(odd()).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [K3Optimizer(model) for model in models]
    for model, optimizer, microbatches in zip(models, optimizers, (1, 4), strict=True):
        train(model, optimizer, range(2), microbatches)
    assert optimizers[0].orthogonalised == optimizers[1].orthogonalised
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("cfg", [odd(), kimi_linear().at_depth(2)], ids=["k3", "kimi_linear"])
def test_learns_a_batch_by_heart(cfg):
    torch.manual_seed(0)
    model = K3(cfg)
    optimizer = K3Optimizer(model, lr=2e-2)
    ids = torch.randint(0, 300, (2, 12))
    losses = []
    for _ in range(30):
        loss, count = cross_entropy(model.hidden_states(ids[:, :-1]), model.lm_head.weight, ids[:, 1:])
        step_loss(loss, count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) / count)
    assert losses[-1] < 0.1 * losses[0]


# ---------------------------------------------------------------------- baselines, and AdamW for everything


def test_adamw_may_have_all_matrices() -> None:
    model = K3(odd())
    muon, adamw = parameter_rules(model), parameter_rules(model, OptimizerSettings(matrices="adamw", adam_lr_scale=0.5))
    assert {r.kind for r in adamw} == {"adamw"} and not any(r.blocks for r in adamw)
    for ours, theirs in zip(muon, adamw, strict=True):
        assert (ours.name, ours.weight_decay) == (theirs.name, theirs.weight_decay)
        assert theirs.lr_scale == 0.5


def test_a_baselines_matrices_stay_whole() -> None:
    size = {"vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    rules = {r.name: r for r in parameter_rules(GPT2(GPT2Config(**size)))}
    assert rules["layers.0.mixer.qkv_proj.weight"].blocks == ((3, 12, 12),)
    assert rules["layers.0.mlp.up_proj.weight"].blocks == ((1, 48, 12),)
    kinds = {name: (r.kind, r.weight_decay) for name, r in rules.items()}
    assert kinds["embed_positions.weight"] == kinds["layers.0.mixer.o_proj.bias"] == ("adamw", 0.0)
    matrices = [name for name, r in rules.items() if r.kind == "muon"]
    assert len(matrices) == 4 and all(rules[name].weight_decay == 0.1 for name in matrices)


def test_a_baseline_with_an_unknown_parameter_is_refused() -> None:
    model = GPT2(GPT2Config(vocab_size=40, hidden_size=12, num_hidden_layers=1, num_attention_heads=3))
    model.layers[0].extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="extra"):
        parameter_rules(model)


def test_the_tower_and_its_projector_have_a_rate_of_their_own() -> None:
    with torch.device("meta"):
        model = K3(K3Config.vision_tiny())
    rules = parameter_rules(model, OptimizerSettings(adam_lr_scale=0.4, vision_lr_scale=0.25))
    eyes = {rule.name.startswith(("vision_tower.", "mm_projector.")): rule.lr_scale for rule in rules}
    assert eyes[True] == pytest.approx(0.1) and len({r.lr_scale for r in rules if r.name.startswith("vision_")}) == 1
    assert all(rule.kind == "adamw" for rule in rules if rule.lr_scale == eyes[True])


def test_matrices_of_the_tower_may_be_muons() -> None:
    """Queries, keys and values are a matrix each; what is no matrix of a block or of the projector stays AdamW's."""
    with torch.device("meta"):
        model = K3(K3Config.vision_tiny())
    rules = {rule.name: rule for rule in parameter_rules(model, OptimizerSettings(vision_matrices="muon"))}
    block = "vision_tower.encoder.blocks.0"
    assert rules[f"{block}.wqkv.weight"].blocks == ((3, 128, 128),)
    assert rules[f"{block}.mlp.fc0.weight"].blocks == ((1, 512, 128),)
    assert rules["mm_projector.proj.2.weight"].kind == "muon" and rules[f"{block}.wo.weight"].lr_scale == 1.0
    left = {name for name, rule in rules.items() if name.startswith(("vision_", "mm_")) and rule.kind == "adamw"}
    assert left == {
        name for name in rules if name.startswith(("vision_", "mm_")) and ("norm" in name or "_embed" in name)
    }
    one_rule = parameter_rules(model, OptimizerSettings(matrices="adamw", vision_matrices="muon"))
    assert {rule.kind for rule in one_rule} == {"adamw"}
