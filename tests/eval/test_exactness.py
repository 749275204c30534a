"""The checks of `nanok3 doctor`: they pass where all is well, and a broken backend does not get by."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from nanok3.eval.exactness import Backend, Check, Draw, check_operator, error_of
from nanok3.eval.exactness_model import EQUALITIES, awkward_model, check_equalities, check_float64
from nanok3.eval.exactness_watch import Answer, kernels_of, watch
from nanok3.kernels import native
from nanok3.stages.doctor_operators import OPERATORS

NAMES = {operator.name: operator for operator in OPERATORS}
HERE = Backend("here")


CASES = [(operator, dtype) for operator in OPERATORS for dtype in operator.dtypes]


@pytest.mark.parametrize(("operator", "dtype"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_every_operator_is_exact(operator, dtype):
    checks = list(check_operator(operator, HERE, dtype))
    assert len(checks) == 1 + operator.gradients
    assert [check for check in checks if not check.ok] == []


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_a_wrong_operator_fails(operator):
    def wrong(*inputs):
        result = operator.run(*inputs)
        if isinstance(result, torch.Tensor):
            return 1.001 * result
        return (1.001 * result[0], *result[1:])

    forward, *gradients = check_operator(replace(operator, run=wrong), HERE, torch.float32)
    assert not forward.ok and not any(check.ok for check in gradients)


def test_a_wrong_gradient_fails_though_the_outputs_are_right():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            return 1.001 * d

    operator = NAMES["SiTU-GLU"]
    wrong = replace(operator, run=lambda g, u: operator.run(Wrong.apply(g), u))
    forward, gradients = check_operator(wrong, HERE, torch.float32)
    assert forward.ok and not gradients.ok


def test_the_whole_model_keeps_every_equality():
    checks = [*check_equalities(HERE), *check_float64(HERE)]
    assert len(checks) == len(EQUALITIES) + 2
    assert [check for check in checks if not check.ok] == []


class Wrapped(nn.Module):
    """A KDA layer with something broken around it."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x, cu_seqlens=None, cache=None):
        return self.change(self.inner, x, cu_seqlens, cache)


QUICK = (
    "in pieces with a cache = at once",
    "a batch = each row alone",
    "packed documents = each alone",
    "later tokens reach no earlier ones",
)


def failures(change):
    """The equalities that a change of every KDA layer breaks."""
    model = awkward_model()
    for layer in model.model.layers:
        if layer.kind == "kda":
            layer.self_attn = Wrapped(layer.self_attn, change)
    equalities = [equality for equality in EQUALITIES if equality[0] in QUICK]
    return {check.what for check in check_equalities(HERE, model, equalities) if not check.ok}


def test_a_state_that_is_not_carried_on_is_seen():
    def forget(inner, x, cu_seqlens, cache):
        if cache is not None:
            cache.recurrent = torch.zeros_like(cache.recurrent)
        return inner(x, cu_seqlens, cache)

    assert failures(forget) == {"in pieces with a cache = at once"}


def test_documents_that_see_each_other_are_seen():
    assert "packed documents = each alone" in failures(lambda inner, x, _, cache: inner(x, None, cache))


def test_rows_that_see_each_other_are_seen():
    def leak(inner, x, cu_seqlens, cache):
        return inner(x, cu_seqlens, cache) + 1e-3 * x.sum(0, keepdim=True)

    assert failures(leak) == {"a batch = each row alone"}


def test_a_look_ahead_is_seen():
    assert "later tokens reach no earlier ones" in failures(lambda inner, x, *rest: inner(x, *rest) + x.mean(1, True))


@pytest.mark.parametrize(
    ("found", "error"),
    [([1.0, 2.0], 0), ([1.0, 2.5], 0.25), ([1.0], float("inf")), ([1.0, float("nan")], float("inf"))],
)
def test_the_error_is_relative_to_the_largest(found, error):
    assert error_of(torch.tensor(found), torch.tensor([1.0, 2.0])) == pytest.approx(error)


def test_a_model_that_raises_fails_and_does_not_stop_the_others():
    def refuse(inner, x, cu_seqlens, cache):
        if cu_seqlens is not None:
            raise RuntimeError("no packed rows")
        return inner(x, cu_seqlens, cache)

    assert failures(refuse) == {"packed documents = each alone"}


def test_a_check_without_a_number_fails():
    assert not Check("x", "y", float("nan"), 1.0).ok and Check("x", "y", 0.0, 0.0).ok


# ---------------------------------------------------------------------- which kernel answers


@contextmanager
def no_compiler():
    load, native.load = native.load, lambda name: None
    try:
        yield
    finally:
        native.load = load


def test_the_kernel_that_answers_is_noted():
    answers = kernels_of(NAMES["KDA"], Draw())
    assert answers == [Answer("kda_cpu.kda", native.available("kda"))]
    with no_compiler():
        assert Answer("kda_cpu.kda", False) in kernels_of(NAMES["KDA"], Draw())


def test_products_of_torch_are_noted():
    def product(x, w):
        return x @ w.T

    assert kernels_of(replace(NAMES["linear"], run=product), Draw()) == [Answer("torch.mm", True)]


def test_watching_ends_with_the_block():
    import sys

    before = sys.getprofile()
    with pytest.raises(RuntimeError), watch():
        raise RuntimeError
    assert sys.getprofile() is before


def test_float32_and_bfloat16_inputs_hold_the_same_numbers():
    wide, narrow = Draw()(3, 4), Draw(torch.bfloat16)(3, 4)
    assert torch.equal(wide.bfloat16(), narrow)
