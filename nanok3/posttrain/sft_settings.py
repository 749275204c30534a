"""How conversations are learned: the settings of pre-training with other defaults. All of it is ours."""

from __future__ import annotations

from dataclasses import replace

from nanok3.train.settings import TrainSettings

DEFAULTS = TrainSettings(batch_size=8, seq_len=1024, lr=2e-3, warmup_fraction=0.03, eval_every=50, sample_every=0)
"""For a model that has read text. The length is counted in epochs where neither steps nor minutes are given."""
WORLD = replace(DEFAULTS, batch_size=4, seq_len=512, lr=2e-2, eval_every=100, precision="float32")
"""For a small model that learns the small world from nothing. In float32, so that every machine gives the same one."""
