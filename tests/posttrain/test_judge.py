"""The judge: its four steps, both orders, the gate. Numbers in names are those of the list in docs/rl.md."""

import pytest

from nanok3.envs.environment import Reply
from nanok3.envs.tools import Call
from nanok3.posttrain.judge import Candidate, ChatJudge, compare, run, tournament

SHORT, LONG, TOO_LONG = Candidate("good", 10), Candidate("good " * 3, 20), Candidate("good " * 9, 45)


def judge(points, skip=(), lies=False):
    """A scripted judge: reads, writes a rubric, scores by points(text), fills the scorepad, says it is done."""

    def policy(played):
        seen = [result.content for observation in played.observations for result in observation.results]
        turn = len(played.replies)
        steps = [
            [Call("read", {"candidate": "A"}), Call("read", {"candidate": "B"})],
            [Call("rubric", {"criteria": "what is asked for, and no more"})],
        ]
        if turn >= 2:
            a, b = (points(text) for text in seen[:2])
            scores = [Call("score", {"candidate": w, "points": p, "reason": ""}) for w, p in (("A", a), ("B", b))]
            steps += [scores, [Call("scorepad", {"A": b, "B": a} if lies else {"A": a, "B": b})]]
        calls = [call for call in (steps[turn] if turn < 4 else []) if call.name not in skip]
        return Reply("", tuple(calls)) if calls else Reply("" if turn < 4 else "done", ())

    return policy


def longer(text):
    return min(10, len(text) / 10)


def always_first(played):
    """Prefers A whatever it is."""
    turn = len(played.replies)
    steps = [
        [Call("read", {"candidate": "A"}), Call("read", {"candidate": "B"}), Call("rubric", {"criteria": "first"})],
        [Call("score", {"candidate": w, "points": p, "reason": ""}) for w, p in (("A", 9), ("B", 1))],
        [Call("scorepad", {"A": 9, "B": 1})],
    ]
    return Reply("", tuple(steps[turn])) if turn < 3 else Reply("done")


def test_23_a_judge_that_likes_length_is_stopped_by_the_gate():
    assert compare(judge(longer), "say good", SHORT, LONG) == (0.0, 1.0)
    assert compare(judge(longer), "say good", SHORT, TOO_LONG) == (0.0, 1.0)
    assert compare(judge(longer), "say good", SHORT, TOO_LONG, longest=2 * 20) == (1.0, 0.0)
    assert compare(judge(longer), "say good", LONG, TOO_LONG, longest=20) == (1.0, 0.0), (
        "exactly at the gate is allowed"
    )
    assert compare(judge(longer), "say good", TOO_LONG, TOO_LONG, longest=20) == (0.0, 0.0)


def test_rewards_are_shares_of_comparisons_won():
    assert tournament(judge(longer), "say good", [SHORT, LONG, TOO_LONG]) == [0.0, 0.5, 1.0]
    assert tournament(judge(longer), "say good", [SHORT, LONG, TOO_LONG], l0=10.0, sigma=2.0) == [0.5, 1.0, 0.0]
    assert tournament(judge(lambda text: 5), "say good", [SHORT, LONG, TOO_LONG]) == [0.5, 0.5, 0.5]


def test_another_winner_in_the_other_order_is_a_tie():
    assert run(always_first, "say good", "x", "y").winner == "A"
    assert compare(always_first, "say good", SHORT, LONG) == (0.5, 0.5)


@pytest.mark.parametrize(
    "step, missing",
    [
        ("read", "A was not read"),
        ("rubric", "was not scored"),  # without one, scoring is refused
        ("score", "A was not scored"),
        ("scorepad", "there is no scorepad"),
    ],
)
def test_a_run_that_skips_a_step_is_rejected_and_is_nobodys_loss(step, missing):
    judged = run(judge(lambda text: 5, skip=(step,)), "say good", "x", "y")
    assert judged.winner is None and missing in judged.missing
    assert compare(judge(longer, skip=(step,)), "say good", SHORT, LONG) is None
    assert tournament(judge(longer, skip=(step,)), "say good", [SHORT, LONG]) == [None, None]


def test_a_scorepad_that_says_otherwise_is_rejected():
    assert "differs" in run(judge(longer, lies=True), "say good", "x" * 10, "y" * 50).missing


def test_a_judge_behind_the_chat_api():
    """The request has the tools and what was said before; calls come back as JSON text."""
    requests, scripted = [], judge(longer)

    def complete(request):
        requests.append(request)
        results = [m["content"] for m in request["messages"] if m["role"] == "tool"]
        turns = sum(m["role"] == "assistant" for m in request["messages"])
        if turns == 0:
            calls = [("read", '{"candidate": "A"}'), ("read", '{"candidate": "B"}')]
        elif turns == 1:
            calls = [("rubric", '{"criteria": "x"}')]
        elif turns == 2:
            points = [longer(text) for text in results[:2]]
            calls = [("score", f'{{"candidate": "{w}", "points": {p}, "reason": ""}}') for w, p in zip("AB", points)]
            calls.append(("scorepad", f'{{"A": {points[0]}, "B": {points[1]}}}'))
        else:
            return {"choices": [{"message": {"content": "done"}}]}
        made = [
            {"id": str(i), "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(calls)
        ]
        return {"choices": [{"message": {"content": None, "tool_calls": made}}]}

    judged = run(ChatJudge(complete), "say good", "x" * 10, "y" * 50)
    assert (judged.winner, judged.missing, judged.rubric) == ("B", None, "x")
    assert {tool["function"]["name"] for tool in requests[0]["tools"]} == {"read", "rubric", "score", "scorepad"}
    assert judged.winner == run(scripted, "say good", "x" * 10, "y" * 50).winner
