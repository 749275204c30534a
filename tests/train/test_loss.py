from __future__ import annotations

import pytest
import torch

from nanok3.train.loss import IGNORE, count_targets, cross_entropy, cross_entropy_reference, step_loss


def problem(*shape, width=12, vocab=37, dtype=torch.float64, ignored=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < ignored] = IGNORE
    return hidden, weight, targets


def gradients(function, hidden, weight, targets, factor=0.37, **options):
    loss, count = function(hidden, weight, targets, **options)
    return loss.detach(), count, *torch.autograd.grad(loss * factor, (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize("shape", [(1,), (2,), (15,), (3, 17), (2, 3, 5)])
def test_equals_the_reference_in_float64(shape, chunk):
    data = problem(*shape)
    got, want = gradients(cross_entropy, *data, chunk=chunk), gradients(cross_entropy_reference, *data)
    assert got[1] == want[1] == int((data[2] != IGNORE).sum())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-12, atol=1e-12)


def test_gradcheck():
    hidden, weight, targets = problem(5, width=3, vocab=6)
    assert torch.autograd.gradcheck(lambda h, w: cross_entropy(h, w, targets, chunk=2)[0], (hidden, weight))


def test_bfloat16_states_and_float32_master():
    hidden, weight, targets = problem(2, 65, width=64, vocab=300, dtype=torch.float32)
    want = gradients(cross_entropy_reference, hidden, weight, targets)
    half = hidden.detach().bfloat16().requires_grad_()
    got = gradients(cross_entropy, half, weight, targets, chunk=50)
    assert (got[0].dtype, got[2].dtype, got[3].dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=0)
    for a, b in zip(got[2:], want[2:], strict=True):
        assert (a.float() - b).norm() < 2e-2 * b.norm()


def test_float32_large_logits_stay_finite():
    hidden, weight, targets = problem(9, dtype=torch.float32)
    big = (hidden.detach() * 1e4).requires_grad_()
    for value in gradients(cross_entropy, big, weight, targets):
        assert torch.isfinite(torch.as_tensor(value)).all()


def test_ignored_rows_may_hold_nan_and_get_a_zero_gradient():
    hidden, weight, targets = problem(4, 9)
    want = gradients(cross_entropy, hidden, weight, targets)
    poisoned = hidden.detach().clone()
    poisoned[targets == IGNORE] = torch.nan
    got = gradients(cross_entropy, poisoned.requires_grad_(), weight, targets)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=0)
    assert (got[2][targets == IGNORE] == 0).all()


def test_nothing_to_predict_is_a_zero_loss_with_zero_gradients():
    hidden, weight, targets = problem(6, ignored=2.0)
    loss, count, d_hidden, d_weight = gradients(cross_entropy, hidden, weight, targets)
    assert (loss, count) == (0, 0) and not d_hidden.any() and not d_weight.any()
    assert step_loss(loss, count) == 0


def test_frozen_head_frozen_states_and_no_grad():
    hidden, weight, targets = problem(8)
    loss, _ = cross_entropy(hidden, weight.detach(), targets)
    (d_hidden,) = torch.autograd.grad(loss, hidden)
    loss, _ = cross_entropy(hidden.detach(), weight, targets)
    (d_weight,) = torch.autograd.grad(loss, weight)
    want = gradients(cross_entropy_reference, hidden, weight, targets, factor=1.0)
    torch.testing.assert_close((d_hidden, d_weight), want[2:])
    with torch.no_grad():
        loss, _ = cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want[0])


def test_two_backward_passes_give_the_same_gradient():
    hidden, weight, targets = problem(8)
    loss, _ = cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(3 * loss, (hidden, weight))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_never_more_logits_than_one_chunk():
    """Every tensor made on the way is recorded: none has more than chunk x vocab values."""
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(t))
            return out

    hidden, weight, targets = problem(400, width=2, vocab=500, dtype=torch.float32)
    with Sizes():
        cross_entropy(hidden, weight, targets, chunk=10)[0].backward()
    assert max(largest) == 10 * 500
    largest.clear()
    with Sizes():
        cross_entropy_reference(hidden, weight, targets)[0].backward()
    assert max(largest) == 400 * 500


def test_microbatches_of_1_and_9_tokens_equal_one_batch_of_10():
    hidden, weight, _ = problem(2, 9)
    targets = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1))
    targets[0, 1:] = IGNORE
    tokens = count_targets(targets)
    assert tokens == 10
    loss, count = cross_entropy(hidden, weight, targets)
    want = torch.autograd.grad(step_loss(loss, count), (hidden, weight))
    shares = [step_loss(cross_entropy(hidden[i], weight, targets[i])[0], tokens) for i in range(2)]
    got = torch.autograd.grad(shares[0] + shares[1], (hidden, weight))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(shares[0] + shares[1], loss / 10)


@pytest.mark.parametrize(("target", "named"), [(37, "37"), (-1, "-1")])
def test_target_outside_the_vocabulary_is_named(target, named):
    hidden, weight, targets = problem(5, ignored=0.0)
    targets[3] = target
    with pytest.raises(ValueError, match=f"{named}.*allowed: 0 to 36"):
        cross_entropy(hidden, weight, targets)


def test_chunk_must_be_positive():
    with pytest.raises(ValueError, match="chunk is 0"):
        cross_entropy(*problem(3), chunk=0)
