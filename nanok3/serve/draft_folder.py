"""A draft on disk: `draft.json` says for which model, `draft.safetensors` has the weights in float32.

The names are ours, those of model/mtp.py with the experts stacked: K3's own draft is in no release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from nanok3.config import K3Config
from nanok3.data.files import write_file
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft
from nanok3.quant.qat import inputs_rule, mxfp8_inputs

FACTS, WEIGHTS = "draft.json", "draft.safetensors"
SAME = ("hidden_size", "num_hidden_layers", "vocab_size", "attn_res_block_size")
"""Fields of the model's config that a draft was made for."""


def save_draft(draft: Draft, folder: Path, facts: dict[str, Any]) -> None:
    """Write both files, each whole or not at all. facts: whatever else is worth knowing."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().float().cpu().contiguous() for name, value in draft.state_dict().items()}
    write_file(folder / WEIGHTS, save(tensors))
    model = {name: getattr(draft.cfg, name) for name in SAME}
    write_file(folder / FACTS, (json.dumps({"model": model, **facts}, indent=2) + "\n").encode())


def read_facts(folder: Path) -> dict[str, Any]:
    """What `draft.json` says. ValueError where there is no draft."""
    try:
        facts = json.loads((folder / FACTS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"draft: {folder} is no draft, {FACTS} cannot be read ({error})") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("model"), dict):
        raise ValueError(f"draft: {folder / FACTS} has no field `model` that says for which model it is")
    return facts


def load_draft(folder: Path, model: K3) -> Draft:
    """The draft of a folder, in the type and on the device of its model, frozen. ValueError if it is another's."""
    check_same(folder, read_facts(folder), model.cfg)
    draft = Draft(model.cfg)
    try:
        tensors = load_file(folder / WEIGHTS)
        draft.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"draft: {folder / WEIGHTS} cannot be used ({' '.join(str(error).split())[:300]})") from None
    same_inputs(model, draft)
    table = model.model.embed_tokens.weight
    return draft.to(table.device, table.dtype).requires_grad_(False).eval()


def same_inputs(model: K3, draft: Draft) -> None:
    """Where the model's routed experts read their inputs in MXFP8, the draft's do, by the same scale rule."""
    rule = inputs_rule(model)
    if rule is not None:
        mxfp8_inputs(draft, rule)


def check_same(folder: Path, facts: dict[str, Any], cfg: K3Config) -> None:
    for name in SAME:
        theirs, ours = facts["model"].get(name), getattr(cfg, name)
        if theirs != ours:
            raise ValueError(f"draft: {folder} was made for a model with {name} = {theirs!r}; this one has {ours!r}")
