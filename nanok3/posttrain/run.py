"""What a run of an expert and a run of a student share: where they stand, the check of their sampler, what they leave.

A run has a length in iterations or in minutes of its own time, and is as far as the one or the other says. Before its
first training step it compares sampler and trainer; at its end it leaves a folder that can be served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from nanok3.data.chat import OURS, SENTENCES_FILE, Sentences
from nanok3.data.files import write_file
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.posttrain.learner import Learner
from nanok3.posttrain.rl_settings import MopdSettings, RLSettings
from nanok3.posttrain.rollout import Rollouts
from nanok3.posttrain.sample import Group
from nanok3.posttrain.score import check_same, compare
from nanok3.serve.run_folder import MARKER
from nanok3.train.track import Tracker

MOST_COMPARED = 64
"""Samples of the comparison."""


class Run:
    """Rollouts and a learner that take turns."""

    model: K3
    learner: Learner
    rollouts: Rollouts
    seconds: float
    """Of iterations, evaluations left out."""
    checked: bool
    """Whether this process has compared its sampler and trainer."""
    track: Tracker
    say: Callable[[str], None]

    @property
    def length(self) -> RLSettings | MopdSettings:
        """The settings that say how long the run is."""
        raise NotImplementedError

    @property
    def iteration(self) -> int:
        return self.rollouts.iteration

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        if self.length.minutes is not None:
            return min(1.0, self.seconds / (60 * self.length.minutes))
        return self.iteration / (self.length.iterations or 1)

    def check(self, groups: Sequence[Group]) -> None:
        """Sampler = trainer, or ValueError: on the first of this process that were sampled with these weights."""
        valid = [sample for group in groups for sample in group.valid]
        fresh = [s for s in valid if s.places and min(s.versions) == self.rollouts.version][:MOST_COMPARED]
        if self.checked or not fresh:
            return
        with self.learner.qat.projected():
            found = compare(self.model, fresh, self.learner.forbidden, self.rollouts.settings.temperature)
        self.track.write("event", self.iteration, message=str(found), largest=found.largest)
        check_same(found, self.model.compute_dtype or self.model.lm_head.weight.dtype)
        self.checked = True
        self.say(str(found))


def save_model(model: K3, tokenizer: Tokenizer, run: Path, stage: str, sentences: Sentences) -> Path:
    """`run/model`, with all that serving needs beside the weights."""
    folder = run / "model"
    save(model, folder, dtype=torch.float32)
    tokenizer.save(folder)
    write_file(folder / MARKER, json.dumps({"stage": stage}).encode())
    if sentences != OURS:
        write_file(folder / SENTENCES_FILE, json.dumps(asdict(sentences)).encode())
    return folder
