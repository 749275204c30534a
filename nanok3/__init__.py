"""nanok3: the whole Kimi K3 system in Python and PyTorch."""

from nanok3.config import K3Config

__version__ = "0.1.0"
__all__ = ["K3Config"]
