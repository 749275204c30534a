"""nanok3: the whole Kimi K3 system in Python and PyTorch.

cfg   = nanok3.K3Config.tiny()
model = nanok3.K3(cfg)
model = nanok3.load(folder)           a checkpoint in the official layout
nanok3.save(model, folder)
tok   = nanok3.Tokenizer.load(folder)
"""

from nanok3 import ops
from nanok3.config import K3Config
from nanok3.data.images import preprocess_image
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.weights import load, save

__version__ = "0.1.0"
__all__ = ["K3", "K3Config", "Tokenizer", "load", "ops", "preprocess_image", "save"]
