"""Training on pictures: the tower runs once a step over each picture once, and the run is exact and resumes exactly."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanok3.config import K3Config
from nanok3.data.loader import MixtureLoader
from nanok3.data.packing import Batch, Pictures, one_pass
from nanok3.data.pictures.kinds import PictureMix
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, prepare
from nanok3.data.tokenizer import train_tokenizer
from nanok3.model.decoder import K3
from nanok3.train.checkpoint import latest, load_checkpoint
from nanok3.train.loop import Trainer
from nanok3.train.loss import cross_entropy
from nanok3.train.recompute import recompute_activations
from nanok3.train.settings import TrainSettings
from nanok3.train.sight import Sight, distinct, read
from nanok3.train.track import read_metrics
from tests.train.conftest import story, tiny

pytestmark = pytest.mark.usefixtures("unchecked")
TOKENS = 256
EYES = {"vt_hidden_size": 16, "vt_num_hidden_layers": 2, "vt_num_attention_heads": 2, "qkv_hidden_size": 16}
EYES |= {"vt_intermediate_size": 32, "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4}
EYES |= {"init_pos_emb_time": 4, "merge_kernel_size": (2, 2), "mm_hidden_size": 16, "text_hidden_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stories and two kinds of pictures, one of them with two pictures a document and one as video."""
    out = tmp_path_factory.mktemp("seen")
    (out / "text").mkdir()
    texts = [story(number) for number in range(30)]
    for number, text in enumerate(texts):
        (out / "text" / f"{number:03}.txt").write_text(text)
    said = ["\nQuestion: What colour is it?\nAnswer: red", "image 64x56", "There are three blue stars in the picture."]
    tokenizer = train_tokenizer([*texts, *said * 20], 560)
    mix = PictureMix(0.5, 60, ("shapes", "compare"))
    prepare([Source("stories", path=out / "text")], tokenizer, out / "data", pictures=mix)
    return out / "data"


def seeing(vocab_size: int, **changes: object) -> K3:
    torch.manual_seed(0)
    return K3(replace(tiny(vocab_size), **(EYES | {"projector_ln_eps": 1e-5} | changes)))


@pytest.fixture
def make(folder: Path, tmp_path: Path):
    def make(run: Path | None = None, model: K3 | None = None, **changes: object) -> Trainer:
        defaults = {"steps": 4, "batch_size": 2, "seq_len": TOKENS, "precision": "float32", "lr": 2e-3}
        defaults |= {"eval_every": 0, "sample_every": 0, "save_every": 0, "qk_clip_every": 2, "log_seconds": 1e9}
        settings = TrainSettings(**(defaults | changes))
        data = Prepared(folder)
        loader = MixtureLoader(data.sources(), data.weights(), settings.batch_size, settings.seq_len, settings.seed)
        sizes = torch.ones(data.manifest["vocab_size"], dtype=torch.int64)
        model = model or seeing(data.manifest["vocab_size"])
        return Trainer(model, loader, settings, run or tmp_path / "run", sizes, report=lambda line: None)

    return make


@pytest.fixture
def batch(folder: Path) -> Batch:
    source = next(s for s in Prepared(folder).sources() if s.name == "shapes")
    return next(one_pass(source, 2, TOKENS))


def gradients(model: K3) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def with_sight(model: K3, batches: list[Batch]) -> dict[str, torch.Tensor]:
    sight = Sight(model)
    sight.look(batches)
    for each in batches:
        cross_entropy(sight.hidden(each), model.lm_head.weight, each.targets.view(1, -1))[0].backward()
    sight.learn()
    return gradients(model)


def test_gradients_are_those_of_one_graph(batch: Batch) -> None:
    """Cut off at the rows and put together again: the same as backward through the whole model."""
    plain, cut = seeing(560), seeing(560)
    cross_entropy(read(plain, batch), plain.lm_head.weight, batch.targets.view(1, -1))[0].backward()
    found = with_sight(cut, [batch])
    whole = gradients(plain)
    assert whole.keys() == found.keys() and float(whole["vision_tower.encoder.blocks.0.wqkv.weight"].abs().sum()) > 0
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_picture_shown_twice_is_seen_once(batch: Batch) -> None:
    """Two microbatches with the same pictures: the tower runs over each once, the gradient is doubled."""
    once, twice = seeing(560), seeing(560)
    single, double = with_sight(once, [batch]), with_sight(twice, [batch, batch])
    for name, gradient in single.items():
        torch.testing.assert_close(double[name], 2 * gradient, rtol=1e-4, atol=1e-6, msg=name)
    sight = Sight(once)
    sight.look([batch, batch])
    assert sight.pictures == len(batch.pictures.ids) and sight.patches == len(batch.pictures.pixel_values)


def test_equal_ids_are_one_picture_in_any_order(batch: Batch) -> None:
    p = batch.pictures
    sizes = p.grid_thw.prod(dim=1).tolist()
    last = Pictures(p.pixel_values[-sizes[-1] :], p.grid_thw[-1:], p.places[-1:], p.ids[-1:])
    found = distinct([last, p])
    assert found.first == {p.ids[-1]: 0, **{id: number for number, id in enumerate(p.ids[:-1], 1)}}
    assert torch.equal(found.pixel_values[: sizes[-1]], last.pixel_values)
    assert len(found.pixel_values) == len(p.pixel_values)


def test_pictures_are_seen_and_learned_from(make) -> None:
    """The loss of picture documents depends on the pixels, and the tower changes; image positions count as load."""
    trainer = make(steps=3)
    before = trainer.model.vision_tower.patch_embed.proj.weight.clone()
    result = trainer.train_step()
    assert result.pictures > 0 and result.patches > 0 and result.vision_grad_norm > 0 and result.vision_seconds > 0
    assert not torch.equal(before, trainer.model.vision_tower.patch_embed.proj.weight)
    trainer.train_step()


def test_all_filled_positions_are_load(make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    shown = next(trainer.batches)
    seen = []
    monkeypatch.setattr(trainer.balancer, "observe", lambda mask: seen.append(mask) or nullcontext())
    trainer.sight.look([shown])
    trainer._backward(shown, 1)
    assert torch.equal(seen[0], shown.filled)
    assert int(seen[0].sum()) > int((shown.targets >= 0).sum())


def test_metrics_tell_what_the_tower_takes(make, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", steps=2)
    lines: list[str] = []
    trainer.say = lines.append
    assert trainer.fit()
    record = next(r for r in read_metrics(tmp_path / "run") if r["kind"] == "train")
    assert 0 < record["vision_share"] < 1 and record["pictures"] > 0 and record["vision_grad_norm"] > 0
    assert any("tower" in line for line in lines)


def test_microbatches_do_not_change_the_step(make, tmp_path: Path) -> None:
    together, apart = make(tmp_path / "a", batch_size=4), make(tmp_path / "b", batch_size=1, accumulate=4)
    for _ in range(2):
        a, b = together.train_step(), apart.train_step()
        assert (a.tokens, a.pictures) == (b.tokens, b.pictures)
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        assert a.vision_grad_norm == pytest.approx(b.vision_grad_norm, rel=1e-2)


def test_resume_is_bit_for_bit(make, tmp_path: Path) -> None:
    """Weights of the tower, optimizer, data position: as if there had been no break."""
    whole = make(tmp_path / "whole", steps=4)
    assert whole.fit()
    broken = make(tmp_path / "broken", steps=4)
    for _ in range(2):
        broken._advance(broken.train_step(), 1.0)
    broken.save()
    model, state = load_checkpoint(latest(tmp_path / "broken")[0])
    again = make(tmp_path / "broken", model, steps=4)
    again.load_state_dict(state)
    assert again.fit()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert whole.progress.losses == again.progress.losses


def test_recompute_changes_nothing_and_keeps_less_of_the_tower(make, batch: Batch, tmp_path: Path) -> None:
    plain, saving = make(tmp_path / "a"), make(tmp_path / "b")
    recompute_activations(saving.model)
    for _ in range(2):
        a, b = plain.train_step(), saving.train_step()
        assert a.loss == pytest.approx(b.loss, abs=1e-6)
        assert a.vision_grad_norm == pytest.approx(b.vision_grad_norm, rel=1e-4)
    assert _kept(saving.model, batch) < _kept(plain.model, batch) / 2


def _kept(model: K3, batch: Batch) -> int:
    """Bytes that a forward of the tower leaves for its backward."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.vision_tower.encoder(torch.randn(400, 16, requires_grad=True), torch.ones(400, 4) + 0j, [400])
    return sum(sizes.values())


def test_validation_reads_the_pictures(make, batch: Batch) -> None:
    trainer = make()
    trainer.validation = {"shapes": [batch]}
    seen = trainer.evaluate()["shapes"]["loss"]
    other = replace(batch.pictures, pixel_values=-batch.pictures.pixel_values)
    trainer.validation = {"shapes": [replace(batch, pictures=other)]}
    assert trainer.evaluate()["shapes"]["loss"] != seen


def test_a_model_without_eyes_is_refused(make) -> None:
    with pytest.raises(ValueError, match=r"no vision tower.*shapes, compare.*--preset vision-small"):
        make(model=K3(K3Config.tiny().with_vocabulary(560)))


def test_a_seeing_model_reads_text_alone(make_trainer) -> None:
    trainer = make_trainer(model=seeing(560))
    result = trainer.train_step()
    assert result.pictures == 0 and result.vision_grad_norm == 0
    trainer._advance(result, 1.0)
