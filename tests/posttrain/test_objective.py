"""The objective: its gradient token by token, against what the formula says. Numbers in names are those of the list of
known problems in docs/rl.md."""

import math

import pytest
import torch

from nanok3.posttrain.objective import Tokens, dense_reward, group_advantages, objective
from nanok3.posttrain.rl_settings import ObjectiveSettings

ANSWERS = (3, 1, 5)


def tokens(behaviour=None, trained=None):
    count = sum(ANSWERS)
    behaviour = torch.linspace(-3.0, -0.5, count) if behaviour is None else behaviour
    trained = [True] * count if trained is None else trained
    parts, at = [], 0
    for n in ANSWERS:
        parts.append((n, behaviour[at : at + n].tolist(), trained[at : at + n]))
        at += n
    return Tokens.of(parts)


def gradient(listed, advantage, rho, divisor=None, **settings):
    """d loss / d logprob of each token, where log pi = log mu + rho."""
    logprob = (listed.logprob.double() + rho).requires_grad_()
    divisor = listed.count if divisor is None else divisor
    loss, masked = objective(logprob, advantage, listed, ObjectiveSettings(**settings), divisor)
    if loss.requires_grad:
        loss.backward()
    return logprob.grad, loss, masked


def spread(per_answer):
    return torch.tensor(per_answer).double()[tokens().answer]


def test_on_policy_it_is_reinforce_with_a_baseline():
    """(a)"""
    listed, advantage = tokens(), spread([0.5, -0.25, -0.25])
    found, _, _ = gradient(listed, advantage, torch.zeros(9, dtype=torch.float64), tau=0.3)
    torch.testing.assert_close(found, -advantage / 9)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("rho", [-0.6, 0.5, 800.0])
def test_outside_the_window_there_is_no_policy_gradient_for_either_sign(sign, rho):
    """(b); 800 would overflow."""
    change = torch.zeros(9, dtype=torch.float64)
    change[4] = rho
    found, _, masked = gradient(tokens(), torch.full((9,), sign).double(), change, tau=0.0)
    assert found[4] == 0 and (found[:4] != 0).all() and torch.isfinite(found).all()
    assert (masked.tokens, masked.outside) == (9, 1)


def test_without_a_preference_only_the_square_acts_and_outside_the_window_too():
    """(c), and what mask_square changes."""
    rho = torch.linspace(-0.7, 0.7, 9).double()
    found, _, _ = gradient(tokens(), torch.zeros(9), rho, tau=0.02)
    torch.testing.assert_close(found, 0.04 * rho / 9)
    inside = (rho >= math.log(0.7)) & (rho <= math.log(1.4))
    found, _, _ = gradient(tokens(), torch.zeros(9), rho, tau=0.02, mask_square=True)
    torch.testing.assert_close(found, 0.04 * rho / 9 * inside)


def test_the_sequence_form_has_the_direction_of_reinforce():
    """(d): at rho = 0 it is 2 tau times it, per answer."""
    advantage = spread([0.5, -0.25, -0.25])
    found, loss, _ = gradient(tokens(), advantage, torch.zeros(9).double(), divisor=3, form="sequence", tau=0.1)
    torch.testing.assert_close(found, -2 * 0.1 * advantage / 3)
    assert float(loss.detach()) == pytest.approx((0.5**2 + 2 * 0.25**2) / 3)


def test_the_sequence_form_counts_answers_with_trained_tokens():
    listed = tokens(trained=[True] * 3 + [False] + [True] * 5)
    rho = torch.linspace(-0.2, 0.3, 9).double()
    _, loss, _ = gradient(listed, spread([1.0, 0.0, 0.5]), rho, divisor=2, form="sequence", tau=0.5)
    wanted = (1 - 0.5 * float(rho[:3].sum())) ** 2 + (0.5 - 0.5 * float(rho[4:].sum())) ** 2
    assert float(loss.detach()) == pytest.approx(wanted / 2)


# ------------------------------------------------------------------ the list of known problems


def test_3_temperature_on_both_sides_gives_ratio_one():
    logits = torch.randn(9, 30).double()
    logp = (logits / 0.6).log_softmax(-1)[:, 0]
    listed = tokens(logp)
    _, _, masked = gradient(listed, torch.zeros(9), (logp - listed.logprob.double()))
    assert masked.ratio / masked.tokens == pytest.approx(1.0, abs=1e-6)
    one_sided = logits.log_softmax(-1)[:, 0]
    assert abs(float((one_sided - logp).exp().mean()) - 1) > 0.01


def test_5_a_missing_logprob_is_an_error():
    with pytest.raises(ValueError, match="answer 1 has 2 tokens, 1 log-prob"):
        Tokens.of([(1, [-1.0], [True]), (2, [-1.0], [True, True])])


def test_7_one_list_for_the_sum_and_its_divisor():
    """A token that is withheld changes neither, and a batch of nothing else has loss 0."""
    trained = [True, False, True, True, True, False, True, True, True]
    rho = torch.linspace(-0.2, 0.2, 9).double()
    found, loss, masked = gradient(tokens(trained=trained), torch.ones(9), rho)
    keep = torch.tensor(trained)
    assert (found[~keep] == 0).all() and masked.tokens == 7
    expected = (0.02 * rho**2 - rho.exp())[keep].sum() / 7
    assert float(loss.detach()) == pytest.approx(float(expected))
    for form in ("token", "sequence"):
        none = tokens(trained=[False] * 9)
        _, loss, _ = gradient(none, torch.ones(9), rho, divisor=none.count, form=form)
        assert float(loss.detach()) == 0.0
    _, loss, _ = gradient(Tokens.of([]), torch.zeros(0), torch.zeros(0).double(), divisor=0)
    assert float(loss.detach()) == 0.0


def test_11_rewards_that_are_not_dyadic_leave_no_residue():
    found = group_advantages(torch.tensor([0.35] * 7 + [1.0]))
    assert found[-1] == pytest.approx(0.65 * 7 / 8, abs=1e-7) and found[0] == pytest.approx(-0.65 / 8, abs=1e-7)
    assert (group_advantages(torch.tensor([0.35] * 8)) == 0).all()
    assert (group_advantages(torch.tensor([0.1] * 7)) == 0).all()


def test_14_the_divisor_of_the_ratio_is_what_the_sampler_said():
    """The current policy is far from the sampler's: the ratio is against the stored number, not against itself."""
    stored, now = torch.linspace(-3.0, -0.5, 9), torch.linspace(-2.9, -0.7, 9).double()
    _, _, masked = gradient(tokens(stored), torch.zeros(9), now - stored.double())
    assert masked.ratio == pytest.approx(float((now - stored.double()).exp().sum()))


def test_25_each_group_sums_to_zero_by_itself():
    low, high = group_advantages(torch.tensor([0.0, 0.1, 0.2])), group_advantages(torch.tensor([0.8, 0.9, 1.0]))
    assert float(low.sum()) == pytest.approx(0, abs=1e-12) and float(high.sum()) == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(low, high, atol=1e-6, rtol=0)


def test_26_a_token_weighs_the_same_in_a_long_answer_as_in_a_short():
    found, _, _ = gradient(tokens(), torch.ones(9), torch.zeros(9).double())
    assert (found == found[0]).all()


def test_dense_rewards_are_clipped_and_carry_no_gradient():
    student = torch.tensor([-1.0, -2.0, -9.0], requires_grad=True)
    found = dense_reward(torch.tensor([-1.0, -9.0, -0.5]), student, 3.0)
    assert found.tolist() == [0.0, -3.0, 3.0] and not found.requires_grad


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"form": "grpo"}, "form is 'grpo'"),
        ({"log_ratio_low": 0.7}, "0, the unchanged policy, must lie inside"),
        ({"tau": -1.0}, "tau is -1.0"),
        ({"form": "sequence", "tau": 0.0}, "no gradient without it"),
    ],
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**wrong)
