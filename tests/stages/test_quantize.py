"""`nanok3 quantize`: the folder it makes, what it measures, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nanok3
from nanok3.cli import main as command
from nanok3.data.plan import Source
from nanok3.data.prepared import prepare
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.latent_moe import PackedExperts
from nanok3.model.mtp import FILE, attach, load_prediction, save_prediction
from nanok3.quant.mxfp import MXFP4, project
from nanok3.serve.run_folder import open_model
from nanok3.stages.eval import data_of
from nanok3.stages.quantize import REPORT, QuantizeArgs, main, rule_of
from nanok3.stages.quantize import measure as measure_cost

TEXTS = [f"Line {i} of a text that is long enough to say something.\n" * 4 for i in range(12)]
CONFIG = nanok3.K3Config.tiny().at_depth(3, hidden_size=64)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its data beside it and one checkpoint of float32 masters; it was trained for scales by floor."""
    folder = tmp_path_factory.mktemp("quantize")
    (folder / "notes").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "notes" / f"{i}.txt").write_text(text)
    tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)})
    prepare([Source("notes", path=folder / "notes")], tokenizer, folder / "data", validation=0.3)
    torch.manual_seed(0)
    model = K3(replace(CONFIG.with_vocabulary(tokenizer.vocab_size), num_experts=4, num_experts_per_token=2))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and not name.endswith("_res_proj.weight"):
                p.normal_(std=p.shape[-1] ** -0.5)
    run = folder / "run"
    nanok3.save(model, run / "checkpoints" / "step-000002" / "model", dtype=torch.float32)
    train = {"seq_len": 64, "qat": "w4a16", "qat_scale_rule": "floor"}
    (run / "config.yaml").write_text(json.dumps({"settings": {"data": str(folder / "data"), "train": train}}))
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "tokens": 10, "loss": 5.0}\n')
    (run / "nanok3.json").write_text('{"stage": "pretrain"}')
    return run


def test_a_run_is_packed_and_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "q"
    assert command(["quantize", str(run), "--out", str(out), "--threads", "1", "--bytes", "600"]) == 0
    shown = capsys.readouterr().out
    assert "scales by floor" in shown and "trained for it: qat w4a16" in shown and "W4A8" in shown
    assert [p.name for p in out.parent.iterdir()] == ["q"], "nothing is left beside it"
    masters = nanok3.load(run / "checkpoints" / "step-000002" / "model", dtype=torch.float32).state_dict()
    values = nanok3.load(out, dtype=torch.float32).state_dict()
    for name, master in masters.items():
        if ".experts." in name:
            assert torch.equal(values[name], project(master, MXFP4, "floor")), name
    report = json.loads((out / REPORT).read_text())
    assert (report["scale_rule"], report["trained_with"]) == ("floor", "w4a16")
    assert {(r["layer"], r["projection"]) for r in report["rounding"]} == {
        (l, p) for l in (1, 2) for p in ("gate", "up", "down")
    }
    bits = report["bits_per_byte"]
    assert list(bits) == ["as stored", "W4A16", "W4A8"]
    assert len({b["notes"] for b in bits.values()}) == 3 and all(7 < b["notes"] < 14 for b in bits.values())


def test_the_folder_serves(run: Path, tmp_path: Path) -> None:
    """It opens as any model does, packed or decoded; quantized again it is refused."""
    out = tmp_path / "q"
    main(QuantizeArgs(model=run, out=out, evaluate=False, threads=1))
    opened = open_model(out, dtype="stored", device="cpu")
    assert opened.stage == "pretrain" and opened.tokenizer.encode("Line") == list(b"Line")
    assert isinstance(opened.model.model.layers[1].feed_forward.experts, PackedExperts)
    with pytest.raises(ValueError, match="packed already"):
        main(QuantizeArgs(model=out, out=tmp_path / "again", evaluate=False))
    assert not (tmp_path / "again").exists()


def test_a_prediction_layer_goes_along(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is, and a damaged one leaves no folder."""
    source, out = tmp_path / "with", tmp_path / "q"
    model = nanok3.load(run / "checkpoints" / "step-000002" / "model", dtype=torch.float32)
    layer = attach(model)
    nanok3.save(model, source, dtype=torch.float32)
    save_prediction(model, source, torch.float32)
    flags = ["--no-evaluate", "--threads", "1", "--dtype", "float32"]
    assert command(["quantize", str(source), "--out", str(out), *flags]) == 0
    assert "the prediction layer goes along" in capsys.readouterr().out
    found = load_prediction(nanok3.load(out, dtype=torch.float32), out)
    assert found is not None
    for name, value in layer.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    (source / FILE).write_bytes((source / FILE).read_bytes()[:-5])
    assert command(["quantize", str(source), "--out", str(tmp_path / "torn"), *flags]) == 2
    assert f"{FILE}: cannot be read" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q", "with"]


def test_the_experts_alone_make_the_difference(run: Path, tmp_path: Path) -> None:
    """Experts that MXFP4 holds exactly: nothing is lost, though the rest was rounded to bfloat16."""
    exact = nanok3.load(run / "checkpoints" / "step-000002" / "model", dtype=torch.float32)
    for name, p in exact.named_parameters():
        if ".experts." in name:
            p.data = project(p.data, MXFP4)
    nanok3.save(exact, tmp_path / "exact", dtype=torch.float32)
    Tokenizer({bytes([byte]): byte for byte in range(256)}).save(tmp_path / "exact")
    args = QuantizeArgs(model=tmp_path / "exact", out=tmp_path / "q", evaluate=False, bytes=300)
    main(args)
    found = measure_cost(args, tmp_path / "exact", "ceil", {"a": TEXTS[:1], "b": TEXTS[1:2]}, 64)
    assert found["as stored"] == found["W4A16"] != found["W4A8"] and list(found["W4A8"]) == ["a", "b", "all"]


def test_the_rule_is_that_of_training() -> None:
    assert rule_of("auto", {})[0] == "ceil" and rule_of("even", {})[0] == "even"
    trained = {"qat": "w4a8", "qat_scale_rule": "even"}
    assert rule_of("auto", trained) == ("even", ["trained for it: qat w4a8, scales by even"])
    rule, [remark] = rule_of("ceil", trained)
    assert rule == "ceil" and "trained for scales by even" in remark


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bytes", "1"], "bytes is 1; it must be at least 2"),
        (["--threads", "0"], "threads is 0; it must lie between"),
        (["--data", "nowhere"], "data: nowhere does not exist"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert command(["quantize", str(run), "--out", str(tmp_path / "q"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_targets_and_models_in_the_way(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which exists; name a folder to be made"):
        main(QuantizeArgs(model=run, out=tmp_path))
    with pytest.raises(ValueError, match=r"no config\.json here"):
        main(QuantizeArgs(model=tmp_path, out=tmp_path / "q"))
    dense = K3(nanok3.K3Config.tiny(first_k_dense_replace=5))
    nanok3.save(dense, tmp_path / "dense")
    with pytest.raises(ValueError, match="K3 has no routed experts"):
        main(QuantizeArgs(model=tmp_path / "dense", out=tmp_path / "q"))


def test_a_run_whose_data_is_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"m was trained on gone, which is not here; give --data"):
        data_of(Path("m"), {"data": "gone"})
