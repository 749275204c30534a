"""nanok3: the whole Kimi K3 system in Python and PyTorch.

cfg   = nanok3.K3Config.tiny()
model = nanok3.K3(cfg)
model = nanok3.load(folder)           a checkpoint in the official layout; experts="stream" leaves experts on disk
nanok3.save(model, folder)
tok   = nanok3.Tokenizer.load(folder)
img   = nanok3.preprocess_image("picture.png")
nanok3.chat.render(messages)          a conversation in K3's markup
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nanok3.config import K3Config

if TYPE_CHECKING:
    from nanok3 import ops
    from nanok3.data import chat
    from nanok3.data.images import preprocess_image
    from nanok3.data.tokenizer import Tokenizer
    from nanok3.model.decoder import K3
    from nanok3.model.weights import load, save

__version__ = "0.1.0"
__all__ = ["K3", "K3Config", "Tokenizer", "chat", "load", "ops", "preprocess_image", "save"]

# Imported when first asked for: `nanok3 --help` must not wait for torch.
_WHERE = {
    "K3": "nanok3.model.decoder",
    "Tokenizer": "nanok3.data.tokenizer",
    "load": "nanok3.model.weights",
    "preprocess_image": "nanok3.data.images",
    "save": "nanok3.model.weights",
}
_MODULES = {"chat": "nanok3.data.chat"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    try:
        return importlib.import_module(f"nanok3.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"nanok3.{name}":
            raise
        raise AttributeError(f"module 'nanok3' has no attribute {name!r}") from None
