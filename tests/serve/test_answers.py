"""Between two threads: pieces are joined, ends come last, and who stops waiting stops the work."""

from __future__ import annotations

import asyncio

import pytest
from served import TOKENIZER, message, served

from nanok3.serve.answers import Answers, Busy, ClientGone, Ended, Piece, Postbox, TextReader, check_outcome, describer
from nanok3.serve.engine import Job, Outcome, Token
from nanok3.serve.events import ContentDelta, MessageEnd
from nanok3.serve.fields import RequestError
from nanok3.serve.generate import StopStrings
from nanok3.serve.metrics import Metrics, pages
from nanok3.serve.sampler import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")


def outcome(reason):
    return Outcome(reason, None, 1, 0, 1, 0.0, 0.0, 0.0, None)


def text_of(ids, stops=(), reason="stop"):
    told = []
    reader = TextReader(0, TOKENIZER, StopStrings(stops), told.append, hidden=[TOKENIZER.eos_id])
    for token in ids:
        if reader.push(Token(token, 0.0)):
            break
    reader.finish(outcome(reason))
    assert isinstance(told[-1], Ended) and isinstance(told[-1].events[-1], MessageEnd)
    return "".join(e.text for item in told for e in item.events if isinstance(e, ContentDelta))


def test_plain_text_is_read_in_whole_characters_up_to_a_stop():
    assert text_of([*"é!".encode(), TOKENIZER.eos_id]) == "é!"
    assert text_of([*b"a stop b"], ["stop"]) == "a "
    assert text_of([*b"a st"], ["stop"], "length") == "a st"
    assert text_of([0xC3], reason="length") == "\N{REPLACEMENT CHARACTER}"


def test_ids_without_a_name_are_not_told():
    token = Token(65, -1.0, ((65, -1.0), (TOKENIZER.vocab_size, -2.0)))
    assert describer(TOKENIZER)(token).top == ((b"A", -1.0),)


@pytest.mark.parametrize(("reason", "status"), [("timeout", 504), ("cancelled", 503), ("error", 500)])
def test_an_end_that_is_no_answer_is_an_error(reason, status):
    with pytest.raises(RequestError) as found:
        check_outcome(outcome(reason))
    assert found.value.status == status
    check_outcome(outcome("length"))


def in_loop(stub, use):
    """Run `use(answers, jobs)` in a loop, with readers that tell the answers."""

    async def go():
        answers = Answers(stub.engine, Postbox(stub.engine), Metrics(stub.engine).gap)
        params = SamplingParams(max_tokens=500)
        readers = [TextReader(k, TOKENIZER, StopStrings(()), answers.tell) for k in range(2)]
        return await use(answers, [Job([1, 2], params, reader) for reader in readers])

    return asyncio.run(go())


def test_pieces_of_a_slow_reader_are_joined():
    async def use(answers, jobs):
        answers.submit(jobs)
        while not answers.engine.idle:
            await asyncio.sleep(0.01)
        return [items async for items in answers.pieces()]

    with served(message()) as stub:
        (items,) = in_loop(stub, use)
        assert [type(item) for item in items] == [Piece, Piece, Ended, Ended]
        assert all(len(item.events) == 1 for item in items)


def test_who_goes_away_cancels_his_jobs():
    async def use(answers, jobs):
        answers.submit(jobs)

        async def receive():
            await asyncio.sleep(0.05)
            return {"type": "http.disconnect"}

        answers.watch(receive)
        with pytest.raises(ClientGone):
            async for _ in answers.pieces(0.01):
                pass

    with served(message(delay_ms=5, content="x" * 400)) as stub:
        in_loop(stub, use)
        assert stub.is_free() and stub.engine.counters.finished == {"cancelled": 2}
        assert pages(stub.engine)["any"]["free"] == stub.engine.pool.pages


def test_all_or_none_are_submitted():
    async def use(answers, jobs):
        with pytest.raises(Busy) as found:
            answers.submit([*jobs, Job([3], jobs[0].params, jobs[0].reader)])
        assert found.value.retry_after >= 1 and all(job.cancelled for job in jobs)

    with served(message(), max_waiting=3, start=False) as stub:
        stub.engine.submit(Job([1], SamplingParams(), TextReader(0, TOKENIZER, StopStrings(()), lambda item: None)))
        in_loop(stub, use)
        assert stub.engine.waiting == 3
        stub.engine.step()
        assert stub.engine.counters.finished == {"cancelled": 2}
