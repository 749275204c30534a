"""A training step side by side: forward, loss, backward, clipping and the optimizer, in tokens a second and memory.

    python bench/train_step.py                          T = 256 (8 rows), 2048, 8192; one thread
    python bench/train_step.py --cpu-time               on a machine with other work
    python bench/train_step.py --threads 2 --bf16

    K3                 ours, with all its parts and its own optimizer (per-head Muon)
    Kimi Linear        ours, with the parts of the next: no attention residuals, latent experts, SiTU or bounded gate
    kimi_linear        transformers, freed memory kept by the C library (its best policy), and with the default policy
    GPT-2              transformers, softmax attention through SDPA

All have about 8 M active parameters (the embedding not counted) and a vocabulary of 4096 with an untied head; all but
K3 are updated by fused AdamW. Precision, tokens and clipping are the same; the loss is taken over all positions. Every
measurement is a process of its own: peak memory is that process's, and rounds are interleaved. A contender whose first
step takes more than `--limit` CPU seconds stops after it, one that wants more than `--memory-gb` has no figures; the
table says so.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
import peers

VOCAB = 4096
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""What tells the C library to keep freed memory; ours does it itself."""


@dataclass
class Options(harness.Options):
    rounds: int = 3
    """Processes of each contender."""
    steps: int = 3
    """Steps a process measures, after one that warms up."""
    lengths: list[int] = field(default_factory=lambda: [256, 2048, 8192])
    """Tokens of a row; 8 rows up to 256, else one."""
    contenders: list[str] = field(default_factory=lambda: list(CONTENDERS))
    bf16: bool = False
    limit: float = 120.0
    memory_gb: float = 16.0
    json: Path = Path("runs/bench/train_step.json")


@dataclass(frozen=True)
class Contender:
    model: str
    ours: bool
    environment: dict[str, str] = field(default_factory=dict)


OUR_K3, OUR_KIMI = "K3", "Kimi Linear"
CONTENDERS = {
    OUR_K3: Contender("k3", True),
    OUR_KIMI: Contender("kimi_linear", True),
    "kimi_linear": Contender("kimi_linear", False, KEEP),
    "kimi_linear, default heap": Contender("kimi_linear", False),
    "GPT-2": Contender("gpt2", False),
}


# ---------------------------------------------------------------------- one process


@dataclass(frozen=True)
class Job:
    model: str
    ours: bool
    batch: int
    tokens: int
    threads: int
    steps: int
    bf16: bool
    limit: float
    memory_gb: float


def measure(job: Job) -> dict[str, Any]:
    """Steps of one contender in this process; `enough` is false where memory was not."""
    import torch

    most = int(job.memory_gb * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    step, active = (our_step if job.ours else peer_step)(job)
    ids = torch.randint(0, VOCAB - 256, (job.batch, job.tokens))
    try:
        seconds, cpu = timed(job, step, ids)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        return {"enough": False, "warm": False, "active": active / 1e6}
    warm = len(seconds) > 1
    return {
        "seconds": seconds[warm:],
        "cpu_seconds": cpu[warm:],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "active": active / 1e6,
        "warm": warm,
        "enough": True,
    }


def timed(job: Job, step: Any, ids: Any) -> tuple[list[float], list[float]]:
    """Seconds and CPU seconds of the step that warms up and of those after it; of the first alone if it is slow."""
    seconds: list[float] = []
    cpu: list[float] = []
    for number in range(job.steps + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        step(ids)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        if number == 0 and cpu[0] > job.limit:
            break
    return seconds, cpu


def our_step(job: Job) -> tuple[Any, float]:
    import torch

    from nanok3.ledger import active_parameters
    from nanok3.model.decoder import K3
    from nanok3.train.loss import IGNORE, cross_entropy
    from nanok3.train.machine import keep_freed_memory
    from nanok3.train.muon import K3Optimizer, OptimizerSettings

    keep_freed_memory()
    cfg = k3_config() if job.model == "k3" else kimi_linear_config()
    model = K3(cfg)
    model.compute_dtype = torch.bfloat16 if job.bf16 else None
    model.train()
    optimizer = K3Optimizer(model, OptimizerSettings(matrices="muon" if job.model == "k3" else "adamw", lr=1e-3))

    def step(ids: torch.Tensor) -> None:
        targets = torch.full_like(ids, IGNORE)
        targets[:, :-1] = ids[:, 1:]
        total, count = cross_entropy(model.hidden_states(ids), model.lm_head.weight, targets)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step, active_parameters(cfg)


def kimi_linear_config() -> Any:
    """The shapes of the peer's configuration below."""
    from nanok3.config import K3Config

    full = (4, 8)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCAB}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64}
    heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "mla_use_output_gate": False}
    experts = {"num_experts": 16, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 256}
    plain = {"routed_expert_hidden_size": None, "latent_moe_use_norm": False, "attn_res_block_size": None}
    return K3Config(
        model_type="kimi_linear",
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=1024,
        hidden_act="silu",
        kda_num_heads=4,
        kda_head_dim=64,
        full_attn_layers=full,
        kda_layers=tuple(l for l in range(1, 9) if l not in full),
        gate_lower_bound=None,
        use_full_rank_gate=False,
        **(ends | attention | heads | experts | plain),
    )


def k3_config() -> Any:
    """The preset: 9 layers, 256 wide, 32 experts of which a token uses 4."""
    from nanok3.config import K3Config

    return K3Config.small()


def peer_step(job: Job) -> tuple[Any, float]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    model, active = peer_gpt2(job.tokens) if job.model == "gpt2" else peer_kimi_linear()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(ids: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job.bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, active


def peer_kimi_linear() -> tuple[Any, float]:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    full = [4, 8]
    linear = {"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "full_attn_layers": full}
    linear["kda_layers"] = [l for l in range(1, 9) if l not in full]
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64}
    heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 64, "mla_use_nope": True}
    experts = {"num_experts": 16, "num_experts_per_token": 2, "num_experts_per_tok": 2, "num_shared_experts": 1}
    router = {"moe_renormalize": True, "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1}
    config = KimiLinearConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        moe_intermediate_size=256,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        moe_router_activation_func="sigmoid",
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        pad_token_id=0,
        use_cache=False,
        linear_attn_config=linear,
        **(attention | heads | experts | router),
    )
    model = KimiLinearForCausalLM(config)
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and "shared" not in name)
    return model, total - VOCAB * 256 - routed * 14 / 16


def peer_gpt2(tokens: int) -> tuple[Any, float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    positions = max(4096, tokens)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=positions,
        n_embd=256,
        n_layer=9,
        n_head=4,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
        **dropout,
    )
    model = GPT2LMHeadModel(config)
    return model, sum(p.numel() for p in model.parameters()) - (VOCAB + positions) * 256


# ---------------------------------------------------------------------- all of them


def run(options: Options, contender: Contender, tokens: int) -> dict[str, Any]:
    """One process; its measurements. SystemExit with its last words if it fails."""
    sizes = (rows_at(tokens), tokens, options.threads, options.steps, options.bf16, options.limit, options.memory_gb)
    job = Job(contender.model, contender.ours, *sizes)
    python = sys.executable if contender.ours else str(peers.PYTHON)
    # Threads that spin while they wait would take the time of whoever shares the machine.
    quiet = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(options.threads)}
    command = [python, __file__, "--row", json.dumps(asdict(job))]
    done = subprocess.run(command, env=os.environ | quiet | contender.environment, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{contender}: {done.stderr.decode()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def rows_at(tokens: int) -> int:
    return 8 if tokens <= 256 else 1


def measurements(options: Options, contenders: list[str], tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Every contender's processes at one length, round by round; one that was too slow is not run again."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, runs in found.items():
            if not runs or runs[-1]["warm"]:
                runs.append(run(options, CONTENDERS[name], tokens))
    return found


def records(options: Options, found: dict[str, list[dict[str, Any]]], tokens: int) -> list[dict[str, Any]]:
    """A record for each contender; its ratios say how many times as long it takes as ours."""
    clock = "cpu_seconds" if options.cpu_time else "seconds"
    seconds = {name: [s for run in runs for s in run[clock]] for name, runs in found.items() if runs[0]["enough"]}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    size = rows_at(tokens) * tokens
    rows: list[dict[str, Any]] = []
    for name, runs in found.items():
        case = {"T": tokens, "rows": rows_at(tokens), "contender": name, "active_M": runs[0]["active"]}
        if name not in medians:
            rows.append(case | {"remark": f"wants more than {options.memory_gb:g} GB"})
            continue
        rates = [size / s for s in seconds[name]]
        speed = {"tokens_s": size / medians[name], "spread": harness.spread(rates), "best": max(rates)}
        cost = {
            "cpu_s_a_step": statistics.median(s for run in runs for s in run["cpu_seconds"]),
            "peak_MB": statistics.median(run["peak_mb"] for run in runs),
        }
        ratios = {
            "kimi_ratio": medians[name] / medians[OUR_KIMI] if OUR_KIMI in medians else None,
            "k3_ratio": medians[name] / medians[OUR_K3] if OUR_K3 in medians else None,
        }
        remark = {} if runs[-1]["warm"] else {"remark": "one step, not warmed up"}
        rows.append(case | speed | cost | ratios | {"remark": ""} | remark)
    return rows


def contenders_here(options: Options) -> list[str]:
    """Those asked for, without the peers that cannot be installed here."""
    unknown = sorted(set(options.contenders) - set(CONTENDERS))
    if unknown:
        raise SystemExit(f"contenders: {unknown} are unknown; allowed: {', '.join(CONTENDERS)}")
    try:
        peers.ensure("transformers")
    except peers.Unavailable as reason:
        print(f"transformers is left out: {reason}")
        return [name for name in options.contenders if CONTENDERS[name].ours]
    return options.contenders


def main(options: Options) -> None:
    options.clock()  # refuses CPU time of several threads
    contenders = contenders_here(options)
    print(harness.machine_line(options.threads), "bfloat16" if options.bf16 else "float32")
    table = harness.Table()
    for tokens in options.lengths:
        table.add(records(options, measurements(options, contenders, tokens), tokens))
        harness.write_json(options.json, table.records, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        print(json.dumps(measure(Job(**json.loads(sys.argv[2])))))
    else:
        import tyro

        main(tyro.cli(Options, description=__doc__))
