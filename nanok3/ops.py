"""The operators under one name."""

from nanok3.model.attn_res import mix as attn_res
from nanok3.model.kda import kda
from nanok3.model.latent_moe import routed as latent_moe
from nanok3.model.situ import situ_glu

__all__ = ["attn_res", "kda", "latent_moe", "situ_glu"]
