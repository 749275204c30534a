"""The small world: every solution is right, no shortcut is, and buttons do what the table says."""

from itertools import islice

import pytest

from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.questions import AnswerEnvironment
from nanok3.envs.small_world import (
    KINDS,
    NAMES,
    ROWS,
    STATES,
    TABLE,
    Ledger,
    Workbench,
    fitting,
    press,
    small_tasks,
    trace,
)
from nanok3.envs.tools import Call

OPEN = {"buttons": AnswerEnvironment, "ledger": Ledger, "program": Workbench}


@pytest.mark.parametrize("kind", KINDS)
def test_solutions_are_right_and_the_splits_are_apart(kind):
    tasks = list(islice(small_tasks(kind), 40))
    for task in tasks:
        played = play(OPEN[kind](), task, scripted(solution(task)))
        assert played.reward == 1 and played.outcome == "done" and not played.tool_errors, played
    held_out = {task.id for seed in (0, 1) for task in islice(small_tasks(kind, "held-out", seed), 40)}
    assert not held_out & {task.id for task in tasks}
    assert [task.id for task in islice(small_tasks(kind), 40)] == [task.id for task in tasks]


@pytest.mark.parametrize("kind", KINDS)
def test_attacks_earn_nothing(kind):
    attacks = [Reply(""), Reply("ok"), Reply("Answer:"), Reply("ok " * 50), Reply("", thinking="")]
    for task in islice(small_tasks(kind), 20):
        listed = Reply("\n".join(map(str, range(100))))
        for reply in [*attacks, Reply(task.goal), listed, Reply(" ".join(map(str, range(100))))]:
            assert play(OPEN[kind](), task, scripted([reply])).reward == 0, (task, reply)


def test_the_table_has_to_be_the_one_asked_for_and_no_other():
    task = next(small_tasks("ledger"))
    *turns, last = solution(task)
    other = next(name for name in NAMES if name != task.hidden["name"])
    more = Reply(calls=(Call("set", {"k": other, "v": 7}),))
    assert play(Ledger(), task, scripted([*turns, last])).reward == 1
    assert play(Ledger(), task, scripted([*turns, more, last])).reward == 0
    assert play(Ledger(), task, scripted([*turns, *turns])).reward == 0, "the episode was not ended by an answer"
    end = press(task.hidden["start"], task.hidden["buttons"])
    everything = tuple(Call("set", {"k": name, "v": end}) for name in NAMES)
    assert play(Ledger(), task, scripted([Reply(calls=everything), last])).reward == 0


def test_a_state_has_to_be_written():
    """Nothing done is never right: the state that is asked for is another one than there is."""
    for task in islice(small_tasks("ledger"), 100):
        assert task.hidden["table"] != task.state["table"]


def test_bad_calls_are_observations():
    for kind, call in (
        ("ledger", Call("get", {"k": "nobody"})),
        ("ledger", Call("set", '{"k": "S", "v": "7"}')),
        ("program", Call("fill", {"b": "__import__('os')"})),
        ("program", Call("fill", {"b": ""})),
        ("program", Call("fill", {"b": "PQ"})),
    ):
        played = play(OPEN[kind](), next(small_tasks(kind)), scripted([Reply(calls=(call,)), Reply("ok")]))
        assert played.tool_errors == 1 and played.reward == 0 and played.outcome == "done"


def filled(task, *buttons):
    """What an episode in which these are filled in, one a turn, gives."""
    return play(Workbench(), task, scripted([*(Reply(calls=(Call("fill", {"b": b}),)) for b in buttons), Reply("ok")]))


def test_one_button_of_the_last_row_is_right_and_the_tests_tell_which():
    ambiguous = 0
    for task in islice(small_tasks("program"), 100):
        kept, end, order = task.state["kept"], task.hidden["end"], task.hidden["buttons"]
        fits = fitting(kept, end)
        assert order[-1] in fits and task.goal == f"{kept}?={end}"
        for button in ROWS[-1]:
            played = filled(task, button)
            seen = played.observations[1].results[0].content
            assert seen.startswith("f1 ok") == (button in fits)
            assert (seen == "f1 ok f2 ok") == (played.reward == 1) == (button == order[-1])
        ambiguous += len(fits) == 2
    assert 10 < ambiguous < 60


def test_two_buttons_may_be_tried_and_not_all_three():
    for task in islice(small_tasks("program"), 30):
        right = task.hidden["buttons"][-1]
        wrong = [button for button in ROWS[-1] if button != right]
        assert filled(task, wrong[0], right).reward == 1 and filled(task, *wrong, right).reward == 0
        at_once = Reply(calls=tuple(Call("fill", {"b": button}) for button in (*wrong, right)))
        assert play(Workbench(), task, scripted([at_once, Reply("ok")])).reward == 0
        assert filled(task, right, wrong[0]).reward == 0, "what is judged is the last program"


def test_buttons_move_every_state_and_their_order_matters():
    assert set(TABLE) == set("".join(ROWS)) and len(TABLE) == 18
    for moved in TABLE.values():
        assert sorted(moved) == [*range(1, STATES + 1)] and all(to != state for state, to in enumerate(moved, 1))
    assert all(len({TABLE[button] for button in row}) == len(row) for row in ROWS)
    pairs = [(one, two) for one in ROWS[0] for two in ROWS[1]]
    turned = [any(press(s, one + two) != press(s, two + one) for s in range(1, STATES + 1)) for one, two in pairs]
    assert sum(turned) > len(pairs) // 2


def test_a_trace_shows_every_state_or_some_and_a_slip_goes_on():
    start, order = 3, "AEGJNR"
    states = [press(start, order[:n]) for n in range(1, 7)]
    assert trace(start, order, 1) == "3" + "".join(f"{button}{state}" for button, state in zip(order, states))
    assert trace(start, order, 3) == f"3AEG{states[2]}JNR{states[5]}" and trace(4, "", 2) == "4"
    _, one, two, *_, last = (int(digit) for digit in trace(start, order, 2, slip=1, at=1) if digit.isdigit())
    assert one == states[1] and two == states[3] % 5 + 1 and last == press(two, "NR") != states[5]


@pytest.mark.parametrize("kind", ["buttons", "ledger"])
def test_the_same_answer_to_everything_is_right_one_time_in_five(kind):
    tasks = list(islice(small_tasks(kind), 400))
    ends = [press(task.hidden["start"], task.hidden["buttons"]) for task in tasks]
    assert max(ends.count(state) for state in range(1, STATES + 1)) < 0.3 * len(ends)


def test_a_kind_that_is_not_there():
    with pytest.raises(ValueError, match="kind is 'x'; expected one of buttons, ledger, program"):
        small_tasks("x")
