"""Who plays the rollouts of a run, when it is not the run's own process: one interface, and how flags name it.

    http://HOST:PORT,...       our own servers                                http_worker.py
    ray:N, ray:N@ADDRESS       N actors of a Ray cluster, or of this machine  ray_worker.py

A run without workers plays them with an engine of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.posttrain.http_worker import HttpWorkers
from nanok3.posttrain.ray_worker import RayWorkers
from nanok3.posttrain.rl_settings import MopdSettings, RLSettings
from nanok3.posttrain.speaker import Speaker


@runtime_checkable
class Workers(Protocol):
    """What plays the rollouts of a run."""

    def check(self, settings: RLSettings | MopdSettings) -> None:
        """ValueError or ImportError where they cannot be used; called before anything is measured or written."""

    def speaker(self, model: K3, tokenizer: Tokenizer, settings: RLSettings | MopdSettings, run: Path) -> Speaker:
        """Says turns with the weights that `model` has when the first turn of a version begins."""


def read_workers(text: str, key: str = "") -> Workers:
    """Workers as a flag names them; `key` is the servers' admin key. ValueError with what is allowed."""
    if text.startswith("ray:"):
        return RayWorkers.read(text)
    return HttpWorkers(tuple(text.split(",")), key)
