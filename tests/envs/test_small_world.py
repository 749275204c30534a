"""The small world: every solution is right, no shortcut is, and the stack machine computes what it should."""

from itertools import islice

import pytest

from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.questions import AnswerEnvironment
from nanok3.envs.small_world import (
    KINDS,
    READ,
    ROWS,
    STATES,
    TABLE,
    WRITTEN,
    Ledger,
    Workbench,
    evaluate,
    press,
    small_tasks,
    trace,
    written,
)
from nanok3.envs.tools import Call, ToolError

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
    other = next(name for name in READ + WRITTEN if name != task.hidden["target"])
    more = Reply(calls=(Call("set", {"k": other, "v": 7}),))
    assert play(Ledger(), task, scripted([*turns, last])).reward == 1
    assert play(Ledger(), task, scripted([*turns, more, last])).reward == 0
    assert play(Ledger(), task, scripted([*turns, *turns])).reward == 0, "the episode was not ended by an answer"
    everything = tuple(
        Call("set", {"k": name, "v": press(task.hidden["start"], task.hidden["buttons"])}) for name in READ + WRITTEN
    )
    assert play(Ledger(), task, scripted([Reply(calls=everything), last])).reward == 0


def test_bad_calls_are_observations():
    for kind, call in (
        ("ledger", Call("get", {"k": "nobody"})),
        ("ledger", Call("set", '{"k": "S", "v": "7"}')),
        ("program", Call("write", {"p": "__import__('os')"})),
        ("program", Call("write", {"p": "x+"})),
        ("program", Call("write", {"p": "9" * 13})),
    ):
        played = play(OPEN[kind](), next(small_tasks(kind)), scripted([Reply(calls=(call,)), Reply("ok")]))
        assert played.tool_errors == 1 and played.reward == 0 and played.outcome == "done"


def test_the_stack_machine():
    assert [evaluate("x3*4+", x) for x in (1, 2)] == [7, 10]
    assert evaluate("x9-", 4) == -5 and evaluate("xx*", 7) == 49
    for wrong in ("", "x+", "x3", "y", "x 3+"):
        with pytest.raises(ToolError):
            evaluate(wrong, 1)


def test_a_program_that_fits_the_two_values_shown_by_chance_is_wrong():
    task = next(task for task in small_tasks("program") if task.hidden["right"] == [3, 4])
    calls = (Call("write", {"p": "xx*6+"}),)  # 7 and 10 at 1 and 2, as 3 x + 4 has
    played = play(Workbench(), task, scripted([Reply(calls=calls), Reply("ok")]))
    assert played.public == "2 of 2 values are right" and played.reward == 0


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
    assert trace(start, order, 1) == "".join(f"{button}{state}" for button, state in zip(order, states))
    assert trace(start, order, 3) == f"AEG{states[2]}JNR{states[5]}"
    one, two, *_, last = (int(digit) for digit in trace(start, order, 2, slip=1, at=1) if digit.isdigit())
    assert one == states[1] and two == states[3] % 5 + 1 and last == press(two, "NR") != states[5]


@pytest.mark.parametrize("kind", ["buttons", "ledger"])
def test_the_same_answer_to_everything_is_right_one_time_in_five(kind):
    tasks = list(islice(small_tasks(kind), 400))
    ends = [press(task.hidden["start"], task.hidden["buttons"]) for task in tasks]
    assert max(ends.count(state) for state in range(1, STATES + 1)) < 0.3 * len(ends)


def test_a_digit_can_be_mended_in_two_ways_and_the_tests_tell_which():
    firsts = []
    for task in islice(small_tasks("program"), 200):
        right, other = (written(*task.hidden[which]) for which in ("right", "other"))
        broken = task.goal.split()[0]
        for program in (right, other):
            assert sum(one != two for one, two in zip(broken, program)) == 1 and len(program) == len(broken)
        world = Workbench()
        world.reset(task)
        assert world.step(Reply(calls=(Call("write", {"p": other}),))).results[0].content == "f1 ok f2 no"
        assert world.step(Reply(calls=(Call("write", {"p": right}),))).results[0].content == "f1 ok f2 ok"
        firsts.append(broken[1] != right[1])
    assert 60 < sum(firsts) < 140


def test_a_kind_that_is_not_there():
    with pytest.raises(ValueError, match="kind is 'x'; expected one of buttons, ledger, program"):
        small_tasks("x")
