"""What a model needs on N devices, and what would fit: the arithmetic behind `nanok3 plan`.

    serving    weights + KDA states + MLA latents + what a forward works with
    training   float32 masters, gradients and moments + copies in the compute dtype + kept activations + the loss

Assumptions, all of them ours:

- Routed experts are dealt out over all devices, whole experts to a device (expert parallelism), and tokens choose them
  evenly.
- The other weights lie split over groups of `split` devices; each group holds one copy. 1 is a copy on every device
  (replicated), all devices is one copy in all (sharded).
- Serving: a group works on sequences of its own. A KDA state is split by heads over the group; latents are read by
  every head and lie whole on each of its devices.
- Training: sequences are dealt out over all devices; a split layer is gathered while it is computed (FSDP). Only
  routed experts are never gathered.
- Attention works in tiles: no score matrix is held. Pictures, messages between devices and the workspace of the
  optimizer step are not counted: leave room for them.

Bytes per number come from `nanok3.ledger`. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nanok3 import ledger
from nanok3.config import K3Config
from nanok3.ledger import KDA, PROJECTOR, ROUTED, VISION, Precision, Weight
from nanok3.official import MXFP4_BLOCK

DEVICE_COUNTS = (*range(1, 9), *range(16, 4097, 8))
"""Numbers of devices that are tried: up to one machine of eight, then whole machines."""
MOST_SEQUENCES = 1 << 24
LOSS_CHUNK = 1024
"""Tokens whose logits exist at once in nanok3.train.loss."""


@dataclass(frozen=True)
class Plan:
    """The question. split None: the one that leaves most room."""

    cfg: K3Config
    train: bool
    batch: int
    context: int
    precision: Precision
    devices: int = 1
    split: int | None = None
    optimizer: str = "muon"
    recompute: bool = False
    prefill_chunk: int = 8192


@dataclass(frozen=True)
class Line:
    """Bytes of one component: all devices together, and the fullest device."""

    name: str
    total: int
    device: int


@dataclass(frozen=True)
class Need:
    """The answer, with the split it is for."""

    split: int
    lines: tuple[Line, ...]

    @property
    def device(self) -> int:
        return sum(line.device for line in self.lines)

    @property
    def total(self) -> int:
        return sum(line.total for line in self.lines)


# ---------------------------------------------------------------------- what is needed


def need(plan: Plan) -> Need:
    """The bytes on every device, with the plan's split or the one that leaves most room on the fullest device."""
    if plan.split is not None:
        splits = [plan.split]
    else:  # a gathered layer costs the same however many share it, so training splits as far as it can
        splits = [plan.devices] if plan.train else allowed_splits(plan)
    bytes_of = _training if plan.train else _serving
    return min((Need(split, tuple(bytes_of(plan, split))) for split in splits), key=lambda answer: answer.device)


def allowed_splits(plan: Plan) -> list[int]:
    """Group sizes that divide the devices and, where a group deals out heads, the heads."""
    heads = plan.cfg.kda_num_heads, plan.cfg.num_attention_heads
    divisors = [n for n in range(1, plan.devices + 1) if plan.devices % n == 0]
    return [n for n in divisors if plan.train or all(h % n == 0 for h in heads)]


def precision_of(cfg: K3Config, name: str, train: bool = False) -> Precision:
    """'stored' (what the config says its checkpoint holds), 'mxfp4' (routed experts packed, the rest bfloat16), 'bf16'
    or 'fp32'. In training it is the precision of the arithmetic, and experts are never packed: MXFP4 there means
    rounding the copies that the forward uses. ValueError for experts that do not divide into MXFP4's blocks."""
    if name == "stored":
        stored = ledger.stored_precision(cfg)
        return stored if not train else precision_of(cfg, "fp32" if stored.plain >= 4 else "bf16", train)
    if name == "mxfp4" and not can_pack(cfg):
        raise ValueError(
            f"precision is 'mxfp4', but the experts' widths {cfg.latent_size} and {cfg.moe_intermediate_size} are not "
            f"both multiples of {MXFP4_BLOCK}; allowed: stored, bf16, fp32"
        )
    return Precision(name, 4 if name == "fp32" else 2, packed=name == "mxfp4" and not train)


def can_pack(cfg: K3Config) -> bool:
    """Whether the experts' rows divide into MXFP4's blocks."""
    return cfg.latent_size % MXFP4_BLOCK == 0 and cfg.moe_intermediate_size % MXFP4_BLOCK == 0


def _share(total: int, parts: int) -> int:
    return -(-total // parts)


def _experts(plan: Plan, name: str, total: int) -> Line:
    """Dealt out whole: the fullest device has ceil(E / N) of a layer's E."""
    E = plan.cfg.num_experts
    return Line(name, total, _share(total * _share(E, plan.devices), E))


def _others(plan: Plan, split: int, name: str, copy: int) -> Line:
    """One copy per group of `split` devices."""
    return Line(name, copy * (plan.devices // split), _share(copy, split))


@cache
def _bytes(cfg: K3Config, per_weight: Callable[[Weight], int]) -> tuple[int, int]:
    """Sums over the weights: routed experts, and all else."""
    sizes = [(w.component == ROUTED, per_weight(w)) for w in ledger.weights(cfg)]
    return sum(n for routed, n in sizes if routed), sum(n for routed, n in sizes if not routed)


# ---------------------------------------------------------------------- serving


def _serving(plan: Plan, split: int) -> Iterator[Line]:
    cfg, plain, groups = plan.cfg, plan.precision.plain, plan.devices // split
    routed, others = model_bytes(plan)
    mine = _share(plan.batch, groups)  # sequences of the fullest group
    kda, latents = ledger.kda_state_bytes(cfg), plan.context * ledger.latent_bytes(cfg, plain)
    in_flight = max(mine, min(plan.prefill_chunk, mine * plan.context))
    work = in_flight * _working_bytes(cfg, plain, split) + 4 * mine * cfg.vocab_size
    if routed:
        yield _experts(plan, "routed experts", routed)
    yield _others(plan, split, "other weights", others)
    if kda:
        yield Line("KDA states, float32", plan.batch * kda, _share(mine * kda, split))
    if latents:
        yield Line("MLA latents", plan.batch * latents * split, mine * latents)
    yield Line("workspace of a forward", work * plan.devices, work)


def model_bytes(plan: Plan) -> tuple[int, int]:
    """Weights in the plan's precision: routed experts, and all else."""
    return _bytes(plan.cfg, plan.precision.nbytes)


@cache
def _working_bytes(cfg: K3Config, plain: int, split: int) -> int:
    """A token in flight: the sources over depth, and the larger half of a layer as if it freed nothing until its end,
    split like its weights."""
    halves = [max(ledger.layer_activations(cfg, l, plain)) for l in range(cfg.num_hidden_layers)]
    return (ledger.depth_sources(cfg) + 2) * cfg.hidden_size * plain + _share(max(halves), split)


def read_bytes(plan: Plan, split: int) -> float:
    """What one decode step of the whole batch moves, all devices together: each group's weights, the experts that the
    batch is expected to choose, the KDA states twice (read and written), the latents on every device of a group."""
    cfg = plan.cfg
    routed, others = model_bytes(plan)
    chosen = 1 - (1 - cfg.num_experts_per_token / cfg.num_experts) ** plan.batch
    latents = split * plan.context * ledger.latent_bytes(cfg, plan.precision.plain)
    return routed * chosen + others * (plan.devices // split) + plan.batch * (2 * ledger.kda_state_bytes(cfg) + latents)


# ---------------------------------------------------------------------- experts from disk


@dataclass(frozen=True)
class Streaming:
    """Serving on one machine with the routed experts on disk (`nanok3.load(..., experts="stream")`).

    trunk: weights that stay in memory; other: states, latents and workspace; expert: bytes of one; per_token: experts
    that a token needs, over all layers; least: memory with which it can run at all."""

    trunk: int
    other: int
    expert: int
    all_experts: int
    per_token: int
    least: int

    def experts_in(self, room: float) -> int:
        """Experts that `room` bytes hold beside all else; 0 where not even those of one layer and token have any."""
        return 0 if room < self.least else min(self.all_experts, int(room - self.trunk - self.other) // self.expert)

    @property
    def cold_bytes(self) -> int:
        """Read for a token of which nothing is in memory."""
        return self.per_token * self.expert


def streaming(plan: Plan) -> Streaming:
    """ValueError for a model without routed experts, or a plan for several devices."""
    cfg = plan.cfg
    layers = sum(cfg.is_moe(l) for l in range(cfg.num_hidden_layers))
    if not layers:
        raise ValueError("experts is 'stream', but the model has no routed experts; allowed: 'resident'")
    if plan.devices != 1:
        raise ValueError(f"devices is {plan.devices}; with experts 'stream' it must be 1")
    lines = {line.name: line.total for line in need(plan).lines}
    routed, trunk = model_bytes(plan)
    other = sum(lines.values()) - routed - trunk
    expert = routed // (layers * cfg.num_experts)
    least = trunk + other + cfg.num_experts_per_token * expert
    return Streaming(trunk, other, expert, layers * cfg.num_experts, layers * cfg.num_experts_per_token, least)


def expert_bytes(cfg: K3Config) -> int:
    """One routed expert as the config says it is stored; 0 without any."""
    routed, _ = _bytes(cfg, ledger.stored_precision(cfg).nbytes)
    layers = sum(cfg.is_moe(l) for l in range(cfg.num_hidden_layers))
    return routed // (layers * cfg.num_experts) if layers else 0


# ---------------------------------------------------------------------- training


def _training(plan: Plan, split: int) -> Iterator[Line]:
    cfg, plain = plan.cfg, plan.precision.plain
    tokens = _share(plan.batch, plan.devices) * plan.context  # of the fullest device
    busy = min(plan.batch, plan.devices)
    for name, per_weight in (("masters", _master), ("gradients", _gradient), ("moments", OPTIMIZERS[plan.optimizer])):
        routed, others = _bytes(cfg, per_weight)
        if routed:
            yield _experts(plan, f"routed experts: {name}, float32", routed)
        yield _others(plan, split, f"other weights: {name}, float32", others)
    if plain < 4:
        yield _copies(plan, split)
    kept = tokens * ledger.activation_bytes(cfg, plain, plan.recompute)
    yield Line("activations", kept * busy, kept)
    head = cfg.vocab_size * cfg.hidden_size * (4 + (plain if plain < 4 else 0))
    loss = min(tokens, LOSS_CHUNK) * cfg.vocab_size * (4 + plain) + head
    yield Line("loss: a chunk's logits, head's gradient", loss * busy, loss)


def _master(w: Weight) -> int:
    return 4 * w.parameters


def _gradient(w: Weight) -> int:
    return 4 * w.parameters if w.trained else 0


def _adamw(w: Weight) -> int:
    """Two moments."""
    return 8 * w.parameters if w.trained else 0


def _muon(w: Weight) -> int:
    """One moment for the matrices of the layers (nanok3.train.muon), AdamW's two for all else."""
    scalars_of_heads = w.component == KDA and w.part == "write strength"
    outside = w.component in (ledger.HEAD, VISION, PROJECTOR)
    return 4 * w.parameters if w.multiplies and not scalars_of_heads and not outside else _adamw(w)


OPTIMIZERS: dict[str, Callable[[Weight], int]] = {"muon": _muon, "adamw": _adamw}
"""Bytes of a weight's float32 moments."""


def _copies(plan: Plan, split: int) -> Line:
    """The layers' weights in the compute dtype: autograd holds them all until the backward, unless a layer is computed
    again there, or gathered again where it is split."""
    layers = [_layer_parameters(plan.cfg, l) for l in range(plan.cfg.num_hidden_layers)]
    routed, others = ([2 * pair[i] for pair in layers] for i in (0, 1))
    experts = _experts(plan, "", max(routed) if plan.recompute else sum(routed))
    rest = max(others) if plan.recompute or split > 1 else sum(others)
    return Line("working copies, bfloat16", experts.total + rest * plan.devices, experts.device + rest)


@cache
def _layer_parameters(cfg: K3Config, layer: int) -> tuple[int, int]:
    """Routed experts, and all else."""
    found = ledger.layer_weights(cfg, layer)
    routed = sum(w.parameters for w in found if w.component == ROUTED)
    return routed, sum(w.parameters for w in found) - routed


# ---------------------------------------------------------------------- what would fit


def fits(plan: Plan, room: float) -> bool:
    """Whether the fullest device's bytes stay within `room`."""
    return need(plan).device <= room


def largest(works: Callable[[int], bool], most: int) -> int:
    """The largest n in [1, most] with works(n), which must hold for all below it; 0 where there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def largest_context(plan: Plan, room: float) -> int:
    """Tokens a sequence, at most the config's max_position_embeddings or what was asked for."""
    most = max(plan.context, plan.cfg.max_position_embeddings)
    return largest(lambda n: fits(replace(plan, context=n), room), most)


def largest_batch(plan: Plan, room: float) -> int:
    """Sequences at this context."""
    return largest(lambda n: fits(replace(plan, batch=n), room), MOST_SEQUENCES)


def fewest_devices(plan: Plan, room: float) -> int | None:
    """The least of DEVICE_COUNTS that is enough, all else equal (a given split too); None where none is."""
    counts = [n for n in DEVICE_COUNTS if plan.split is None or n % plan.split == 0]
    return next((n for n in counts if fits(replace(plan, devices=n), room)), None)


def limits(plan: Plan, room: float) -> dict[str, int | None]:
    """How far context, batch and devices may go, each with all else equal; 0 or None where they help by no amount."""
    return {
        "context": largest_context(plan, room),
        "batch": largest_batch(plan, room),
        "devices": fewest_devices(plan, room),
    }


def alternatives(plan: Plan, room: float) -> list[dict[str, Any]]:
    """Cheaper settings that fit, one at a time; where none does alone, the limits with all of them; and the largest
    model of the family that fits."""
    cheaper = _cheaper(plan)
    found = [{"settings": flag, "device": need(other).device} for flag, other in cheaper if fits(other, room)]
    if cheaper and not found:
        together = leanest(plan)
        flags = " ".join(flag for flag, _ in cheaper)
        found.append({"settings": flags, "device": need(together).device, "limits": limits(together, room)})
    depth = largest(lambda n: fits(_at_depth(plan, n), room), plan.cfg.num_hidden_layers - 1)
    if depth:
        smaller = _at_depth(plan, depth)
        size = ledger.parameters(smaller.cfg)
        found.append({"depth": depth, "parameters": size, "device": need(smaller).device})
    return found


def leanest(plan: Plan) -> Plan:
    """The plan with every setting that saves memory and leaves the task as it is."""
    plan = replace(plan, precision=_smallest(plan))
    if plan.train:
        plan = replace(plan, optimizer="muon", recompute=True)
    unsplit = replace(plan, split=None)
    return unsplit if need(unsplit).device < need(plan).device else plan


def _cheaper(plan: Plan) -> list[tuple[str, Plan]]:
    """One step of `leanest` at a time, under the flag that takes it."""
    lean = leanest(plan)
    steps: list[tuple[str, dict[str, Any]]] = [
        (f"--precision {lean.precision.name}", {"precision": lean.precision}),
        ("--optimizer muon", {"optimizer": lean.optimizer}),
        ("--recompute", {"recompute": lean.recompute}),
        ("no --split", {"split": lean.split}),
    ]
    changed = [(flag, replace(plan, **change)) for flag, change in steps]
    return [(flag, other) for flag, other in changed if other != plan]


def _smallest(plan: Plan) -> Precision:
    if not plan.train and can_pack(plan.cfg):
        return plan.precision if plan.precision.packed else precision_of(plan.cfg, "mxfp4")
    return plan.precision if plan.precision.plain == 2 else precision_of(plan.cfg, "bf16", plan.train)


def _at_depth(plan: Plan, depth: int) -> Plan:
    return replace(plan, cfg=plan.cfg.at_depth(depth))
