"""A small model that sees, and pictures for it."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import torch
from PIL import Image as Pillow

from nanok3.config import K3Config
from nanok3.data.images import preprocess_image
from nanok3.model.decoder import K3

VOCAB = 512
VISION = {
    "vt_hidden_size": 16,
    "vt_num_hidden_layers": 2,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 16,
    "vt_intermediate_size": 24,
    "mm_hidden_size": 16,
    "patch_size": 14,
    "merge_kernel_size": (2, 2),
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
    "projector_ln_eps": 1e-5,
}


def seeing_model(depth=4, **changes):
    """KDA and MLA layers, a tower of two blocks; ids of the byte tokenizer."""
    torch.manual_seed(3)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(depth).with_vocabulary(VOCAB)
    return K3(replace(cfg, **{**VISION, "text_hidden_size": cfg.hidden_size, **changes})).eval()


def drawing(seed, width=100, height=70, kind="PNG"):
    """The bytes of a picture of 4 x 3 feature rows."""
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    file = io.BytesIO()
    Pillow.fromarray(noise.numpy()).save(file, kind)
    return file.getvalue()


def picture(seed, width=100, height=70):
    return preprocess_image(drawing(seed, width, height))


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
