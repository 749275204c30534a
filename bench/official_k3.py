"""The released K3 code on a CPU: a checkpoint in the official layout, prefill and decode for bench/inference.py.

    bench/.venv-peers/bin/python bench/official_k3.py --official DIR --fla DIR --model FOLDER

The modeling file of the release comes with the wheel of llmcompressor; what it imports and a CPU has not is put in its
place: FLA's short convolution, gated norm and KDA with the same call signatures, in plain torch. Prefill runs FLA's own
naive chunk form where fla-core is given, else the token recurrence; decode always the recurrence. The class declares
only flash attention; it runs with torch's SDPA here, which gives the same logits.

It reads one request a line and answers with a JSON object, like the other workers of bench/inference.py. It is run in
the environment of the peers and knows nothing of nanok3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CHUNK = 64


# ---------------------------------------------------------------------- what the release takes from FLA


class ShortConvolution(nn.Module):
    """A causal convolution per channel with SiLU; the cache is the last inputs."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str = "silu", **_: Any) -> None:
        super().__init__()
        self.taps = kernel_size
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))

    def forward(
        self, x: Tensor, cache: Tensor | None = None, output_final_state: bool = False, cu_seqlens: None = None
    ) -> tuple[Tensor, Tensor | None]:
        u = x.transpose(1, 2).to(self.weight.dtype)
        u = F.pad(u, (self.taps - 1, 0)) if cache is None else torch.cat([cache, u], -1)
        y = F.silu(F.conv1d(u, self.weight, groups=u.shape[1])).transpose(1, 2).to(x.dtype)
        return y, u[..., 1 - self.taps :] if output_final_state else None


class FusedRMSNormGated(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5, activation: str = "sigmoid") -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        h = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return (h * g.float().sigmoid()).to(g.dtype)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """KDA token by token. q k v g (B, T, H, D) in float32, beta (B, T, H), state (B, H, K, V)."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    rows = []
    for t in range(T):
        S = S * g[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t].unsqueeze(-1) * k[:, t], error)
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * K**-0.5)
    return torch.stack(rows, 1), S


def kda(form: Callable[..., tuple[Tensor, Tensor]], multiple: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """FLA's entry point around a plain form: unit length of q and k, gates, padding to whole chunks."""

    def unit(x: Tensor) -> Tensor:
        return x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6)

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
        initial_state: Tensor | None = None, lower_bound: float | None = None, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        H, T = q.shape[2], q.shape[1]
        decay = g.float() + dt_bias.float().view(H, -1)
        decay = lower_bound * torch.sigmoid(A_log.float()[:H, None].exp() * decay)
        parts = [unit(q), unit(k), v.float(), decay]
        pad = -T % multiple
        parts = [F.pad(x, (0, 0, 0, 0, 0, pad)) for x in parts]
        weights = F.pad(beta.float().sigmoid(), (0, 0, 0, pad))
        o, S = form(*parts, weights, initial_state=initial_state, output_final_state=True)
        return o[:, :T].to(v.dtype), S

    return call


def naive_chunks(fla: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    """FLA's own chunk form in plain torch, out of its file alone."""
    spec = importlib.util.spec_from_file_location("fla_naive", fla / "fla/ops/kda/naive.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_chunk_kda


def stand_in(name: str, **attributes: Any) -> None:
    """A module of this name with these contents."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes, __path__=[])
    sys.modules[name] = module


def import_release(official: Path, fla: Path | None) -> tuple[Any, Any]:
    """Configuration and modeling modules of the release, with the stand-ins in place."""
    chunk = (recurrent, 1) if fla is None else (naive_chunks(fla), CHUNK)
    for name in ("fla", "fla.ops", "fla.ops.utils", "llmcompressor", "llmcompressor.modeling"):
        stand_in(name)
    stand_in("fla.modules", FusedRMSNormGated=FusedRMSNormGated, ShortConvolution=ShortConvolution)
    stand_in("fla.ops.kda", chunk_kda=kda(*chunk), fused_recurrent_kda=kda(recurrent, 1))
    stand_in("fla.ops.utils.index", prepare_cu_seqlens_from_mask=None, prepare_lens_from_mask=None)
    stand_in("fla.utils", tensor_cache=lambda function: function)
    stand_in("llmcompressor.modeling.moe")
    stand_in("llmcompressor.modeling.moe.context", get_calibrate_all_experts_flag=lambda: False)
    stand_in("llmcompressor.modeling.kimi_k3")
    sys.modules["llmcompressor.modeling.kimi_k3"].__path__ = [str(official / "llmcompressor/modeling/kimi_k3")]
    parts = ("configuration_kimi_k3", "modeling_kimi_linear")
    return tuple(importlib.import_module(f"llmcompressor.modeling.kimi_k3.{part}") for part in parts)  # type: ignore[return-value]


# ---------------------------------------------------------------------- the model


def stored_tensors(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Text part by its names in the class; packed experts decoded, what is stored in float32 left so."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if not name.startswith("language_model.") or name.endswith("_scale"):
                    continue
                value, ours = tensors.get_tensor(name), name.removeprefix("language_model.")
                if name.endswith("_packed"):
                    value = decoded(value, tensors.get_tensor(name.replace("_packed", "_scale"))).to(dtype)
                    ours = ours.removesuffix("_packed")
                yield ours, value.to(dtype) if value.dtype == torch.bfloat16 else value


def decoded(packed: Tensor, scale: Tensor) -> Tensor:
    values = torch.stack([MXFP4[(packed & 15).long()], MXFP4[(packed >> 4).long()]], -1).flatten(-2)
    return values * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


def load(official: Path, fla: Path | None, folder: Path, dtype: torch.dtype) -> Any:
    """The released class with the folder's weights."""
    configuration, modeling = import_release(official, fla)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for name in ("quantization_config", "dtype"):
        text.pop(name, None)
    modeling.KimiPreTrainedModel._supports_sdpa = True
    cfg = configuration.KimiLinearConfig(**text)
    cfg._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = modeling.KimiLinearForCausalLM(cfg)
    heads = text["linear_attn_config"]["num_heads"]
    # The release pads A_log to 128 entries; its class has one a head.
    tensors = {n: x[:heads] if n.endswith("A_log") else x for n, x in stored_tensors(folder, dtype)}
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


# ---------------------------------------------------------------------- the worker


class Worker:
    """Answers requests: prefill of so many tokens, decoding of so many after a depth, logits of given ids."""

    def __init__(self, model: Any) -> None:
        self.model, self.vocab = model, model.config.vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def ids(self, batch: int, tokens: int) -> Tensor:
        return torch.randint(3, self.vocab, (batch, tokens), generator=self.generator)

    @torch.inference_mode()
    def prefill(self, tokens: int, batch: int = 1) -> Any:
        """The cache, after logits of the last token only: the class would compute those of all tokens, which the
        other engines do not."""
        out = self.model.model(input_ids=self.ids(batch, tokens), use_cache=True)
        self.model.lm_head(out.last_hidden_state[:, -1:])
        return out.past_key_values

    @torch.inference_mode()
    def decode(self, past: Any, batch: int, tokens: int) -> None:
        for _ in range(tokens):
            self.model(input_ids=self.ids(batch, 1), past_key_values=past, use_cache=True)

    def answer(self, what: str, *words: str) -> dict[str, float]:
        """`prefill TOKENS BATCH 0`, `decode TOKENS BATCH DEPTH`, or `logits IDS.txt OUT.f32`."""
        if what == "logits":
            ids = [int(word) for word in Path(words[0]).read_text().split()]
            with torch.inference_mode():
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            logits.numpy().tofile(words[1])
            return {}
        tokens, batch, depth = map(int, words)
        if what == "prefill":
            return timed(lambda: self.prefill(tokens, batch))
        past = self.prefill(max(depth, 1), batch)
        self.decode(past, batch, 2)
        return timed(lambda: self.decode(past, batch, tokens))


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


def timed(run: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("official", "model"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--fla", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    worker = Worker(load(args.official, args.fla, args.model, getattr(torch, args.dtype)))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answer = worker.answer(*line.split())
        answer["peak_rss"] = peak_memory()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
