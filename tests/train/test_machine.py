"""What the machine can do."""

from __future__ import annotations

import pytest
import torch

from nanok3.train.machine import choose_device, choose_precision, describe, keep_freed_memory, matmul_rate


def test_named_precisions() -> None:
    assert choose_precision("float32") == torch.float32
    assert choose_precision("bfloat16") == torch.bfloat16
    with pytest.raises(ValueError, match="precision is 'int8'; allowed"):
        choose_precision("int8")


@pytest.mark.parametrize(("bf16_rate", "chosen"), [(1.4, torch.float32), (1.6, torch.bfloat16)])
def test_auto_takes_bfloat16_where_it_pays(monkeypatch, bf16_rate: float, chosen: torch.dtype) -> None:
    rates = {torch.float32: 1.0, torch.bfloat16: bf16_rate}
    monkeypatch.setattr("nanok3.train.machine.matmul_rate", lambda dtype, device: rates[dtype])
    assert choose_precision("auto") == chosen


def test_a_rate_is_plausible() -> None:
    assert 1e8 < matmul_rate(torch.float32, size=128, seconds=0.01) < 1e14


def test_the_heap_setting_does_not_break_allocation() -> None:
    keep_freed_memory()
    assert float(torch.ones(1 << 20).sum()) == 1 << 20


def test_description_has_what_a_report_needs() -> None:
    assert {"processor", "cores", "threads", "python", "torch", "system"} <= set(describe())


def test_devices(monkeypatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device is 'cuda', but torch finds no GPU here"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="device is 'tpu'; allowed"):
        choose_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")
