"""A run of draft training: steps over a run's own text, held-out acceptance every so often, files that can be used and
gone on from at any time.

    OUT/draft.json, draft.safetensors    the draft as it is (serve/draft_folder.py), with its acceptance; with QAT its
                                         experts as they are rounded
    OUT/training.pt                      weights as they were before, optimizer, place in the data and step: `resume`
                                         goes on bit for bit
    OUT/metrics.jsonl                    the loss of each step, and what was measured
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanok3.data.files import check_place, write_file
from nanok3.data.packing import Batch
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, prediction_of
from nanok3.posttrain.draft import Acceptance, losses, mean_loss, measure, read
from nanok3.posttrain.draft_settings import DraftSettings
from nanok3.quant.qat import QAT, mxfp8_inputs
from nanok3.serve.draft_folder import WEIGHTS, same_inputs, save_draft
from nanok3.serve.generate import unbroken
from nanok3.train.loop import Batches
from nanok3.train.schedule import learning_rate

TRAINING = "training.pt"
PARTS = {"step", "settings", "draft", "optimizer", "loader"}


def check_folder(out: Path, resume: bool) -> None:
    """ValueError for a folder that holds a draft to be gone on with, or something else, whose files would be mixed with
    the draft's."""
    if (out / WEIGHTS).exists() and not resume:
        raise ValueError(f"out: {out} holds a draft; add --resume, or choose another folder")
    for name in ("config.json", "config.yaml", "model", "checkpoints", "manifest.json"):
        if (out / name).exists():
            raise ValueError(f"out: {out} has a {name}, as models, runs and data have; choose another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is {out}, which is no folder")
    check_place("out", out)


class DraftRun:
    """One run; `held_out` are batches of a row each. Where a prediction layer hangs on the model, the draft starts as
    that: the fusion begins as [0 0 I]."""

    def __init__(
        self,
        model: K3,
        loader: Batches,
        held_out: Sequence[Batch],
        settings: DraftSettings,
        out: Path,
        say: Callable[[str], None] = print,
        resume: bool = False,
    ) -> None:
        check_folder(out, resume)
        self.model = model.requires_grad_(False).eval()
        self.settings = settings = settings.of_model({})
        self.loader, self.held_out, self.out, self.say = loader, held_out, out, say
        self.batches = iter(loader)
        self.device = model.lm_head.weight.device
        torch.manual_seed(settings.seed)
        self.draft = Draft(model.cfg).to(self.device)
        learned = prediction_of(model)
        if learned is not None:
            self.draft.layer.load_state_dict(learned.state_dict())
        self.step, self.found = 0, Acceptance.empty(settings.unroll)
        state = self._saved() if resume else None
        if resume and state is None:
            say(f"{out} has no {TRAINING}: from the beginning")
        if state is not None:
            self.draft.load_state_dict(state["draft"])
        if settings.qat == "w4a8":
            mxfp8_inputs(model, settings.qat_scale_rule)
        self.qat = QAT(self.draft, settings.qat, settings.qat_scale_rule)
        same_inputs(model, self.draft)
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), settings.lr, (0.9, 0.95), weight_decay=0.0)
        if state is not None:
            self.step = state["step"]
            self.optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            say(f"going on after step {self.step}")

    def _saved(self) -> dict[str, Any] | None:
        if not (self.out / TRAINING).is_file():
            return None
        place = self.out / TRAINING
        try:
            state: dict[str, Any] = torch.load(place, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{place}: cannot be read ({' '.join(str(error).split())[:200]})") from None
        if not isinstance(state, dict) or not state.keys() >= PARTS:
            raise ValueError(f"{place}: this is no state of draft training")
        asked = {**asdict(self.settings), "eval_every": 0, "save_every": 0}
        for name, value in state["settings"].items():
            if asked[name] != value:
                raise ValueError(f"{name} is {asked[name]}; {self.out} was begun with {value}, which cannot change")
        return state

    def fit(self) -> None:
        """Train to the end; Ctrl-C saves and is raised again."""
        self._measure()
        try:
            while self.step < self.settings.steps:
                with unbroken():
                    loss = self._train_step()
                    self.step += 1
                    self._record(kind="train", loss=loss)
                    if self.step % self.settings.eval_every == 0 or self.step == self.settings.steps:
                        self._measure(loss)
                    if self.step % self.settings.save_every == 0:
                        self.save()
        except KeyboardInterrupt:
            self.save()
            self.say(f"interrupted after step {self.step}; saved. --resume goes on")
            raise
        self.save()

    def _train_step(self) -> float:
        total = 0.0
        for _ in range(self.settings.rows):
            batch = next(self.batches).to(self.device)
            with self.qat.projected():
                loss = mean_loss(losses(self.model, self.draft, read(self.model, batch), self.settings.unroll))
                (loss / self.settings.rows).backward()
            total += loss.item() / self.settings.rows
        nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings.steps, self.settings.lr, 0.02, 0.1)
        self.optimizer.step()
        self.qat.stepped()
        self.optimizer.zero_grad()
        return total

    def _measure(self, loss: float | None = None) -> None:
        with self.qat.projected():
            self.found = measure(self.model, self.draft, self.held_out, self.settings.unroll)
        chances = self.found.by_position
        self._record(kind="eval", acceptance=chances, accepted_length=self.found.accepted_length)
        kept = " ".join(f"{chance:.0%}" for chance in chances)
        trained = "" if loss is None else f"loss {loss:.3f} · "
        self.say(f"step {self.step:5d} · {trained}kept {kept} · {self.found.accepted_length:.2f} tokens a pass")

    def _record(self, **fields: Any) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **fields}) + "\n")

    def save(self) -> None:
        """The draft, then what goes on from it."""
        length = self.found.accepted_length
        facts = {"step": self.step, "acceptance": self.found.by_position, "accepted_length": length}
        facts |= {"qat": self.settings.qat}
        with self.qat.projected():
            save_draft(self.draft, self.out, facts)
        settings = {**asdict(self.settings), "eval_every": 0, "save_every": 0}
        parts = {"draft": self.draft, "optimizer": self.optimizer, "loader": self.loader}
        state = {name: part.state_dict() for name, part in parts.items()}  # type: ignore[attr-defined]
        buffer = io.BytesIO()
        torch.save({"step": self.step, "settings": settings, **state}, buffer)
        write_file(self.out / TRAINING, buffer.getvalue())
