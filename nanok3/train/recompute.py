"""Activation checkpointing, applied to a built model from outside: a layer's inner activations are thrown away in the
forward pass and made again in the backward. What a layer keeps is its two inputs; the mixes over depth keep only
references (model/attn_res.py). Of the vision tower each block is a layer."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from nanok3.model import latent_moe
from nanok3.model.decoder import K3, DecoderLayer


def recompute_activations(model: K3) -> None:
    """Checkpoint both halves of every layer, one that guesses ahead included, and every block of the vision tower.
    Routing is recomputed from the same bias, since balancing acts only after the backward; observers must not count the
    second pass (quantile_balancing does not)."""
    for layer in decoder_layers(model):
        for half in ("attend", "feed"):
            setattr(layer, half, partial(checkpoint, getattr(layer, half), use_reentrant=False))
    for block in model.vision_tower.encoder.blocks if model.cfg.has_vision else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def decoder_layers(model: K3) -> list[DecoderLayer]:
    return [module for module in model.modules() if isinstance(module, DecoderLayer)]


def compile_layers(model: K3) -> None:
    """torch.compile both halves of every layer; our operators stay opaque to it, and so does the grouped product, which
    torch 2.13 refuses to trace in float32 although it runs. Minutes of start-up."""
    for name in ("_grouped_product", "_experts_cuda"):
        setattr(latent_moe, name, torch.compiler.disable(getattr(latent_moe, name)))
    for layer in decoder_layers(model):
        for half in ("attend", "feed"):
            setattr(layer, half, torch.compile(getattr(layer, half), dynamic=True))
