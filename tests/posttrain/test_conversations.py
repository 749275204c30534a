"""Conversations as training data: what is learned is what was sampled, by who wrote it and never by its value.

Numbers are those of the known problems in the specification of post-training, section 4.
"""

import base64
import io
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from nanok3.data.chat import answer, encode, encode_with_mask, render
from nanok3.data.packing import NO_TARGET
from nanok3.posttrain.conversations import (
    SAMPLED,
    Conversations,
    Encoder,
    Kind,
    conversation_of,
    kinds_of,
    read_conversations,
)
from nanok3.posttrain.domains import small_tokenizer
from nanok3.train.loss import count_targets, cross_entropy, step_loss

TOKENIZER = small_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"properties": {"k": {"type": "string"}}}}}]


def call(name, arguments, number="1"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def long_chat(thinking="so: ada"):
    """Every kind of message; a call whose arguments are no JSON among them."""
    return [
        {"role": "system", "content": "be <|sep|> brief"},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "one moment",
            "reasoning_content": thinking,
            "tool_calls": [call("get", {"k": "ada", "n": 3}), call("get", "{broken", "2")],
        },
        {"role": "tool", "content": "he", "tool_call_id": "1"},
        {"role": "tool", "content": "llo", "tool_call_id": "2"},
        {"role": "assistant", "content": "hello <|close|>", "reasoning_content": ""},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "", "reasoning_content": thinking},
    ]


def row(messages=None, **fields):
    return conversation_of({"messages": messages or long_chat(), "tools": TOOLS, **fields}, "here")


def example(*arguments, **fields):
    return Encoder(TOKENIZER)(row(*arguments, **fields))


def source(*examples, pad=None):
    return Conversations("some", examples, TOKENIZER.pad_id if pad is None else pad)


def text(ids):
    return TOKENIZER.decode(ids.tolist())


# ---------------------------------------------------------------------- the mask


def test_each_channel_is_what_the_model_samples_there():
    one = example(effort="high")
    of = {kind: text(one.ids[one.kinds == kind]) for kind in Kind}
    think, response = "<|close|>think<|sep|>", "<|close|>response<|sep|>"
    assert of[Kind.THINK] == f"so: ada{think}{think}so: ada{think}"
    opened = "<|open|>response<|sep|>"
    assert of[Kind.RESPONSE] == f"{opened}one moment{response}{opened}hello <|close|>{response}{opened}{response}"
    assert of[Kind.END] == "<|close|>message<|sep|><|end_of_msg|>" * 3
    assert of[Kind.TOOLS] == (
        '<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|>'
        '<|open|>argument key="k" type="string"<|sep|>ada<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="get" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    assert '<|open|>json type="object"<|sep|>{broken<|close|>json<|sep|>' in of[Kind.GIVEN]
    assert "be <|sep|> brief" in of[Kind.GIVEN] and "effort" in of[Kind.GIVEN]
    assert of[Kind.GIVEN].count('message role="assistant"<|sep|><|open|>think<|sep|>') == 3


def test_the_kinds_are_the_renderers_mask():
    for thinking in (True, False):
        segments = row(thinking=thinking).render()
        ids, sampled = encode_with_mask(segments, TOKENIZER)
        one = example(thinking=thinking)
        assert one.ids.tolist() == ids and ((one.kinds > 0) == sampled).all()
        assert len(list(kinds_of(segments))) == len(segments)
    assert not (one.kinds == Kind.THINK).any()


def test_problem_06_observations_have_no_gradient_and_the_mask_counts_the_sampled():
    some = source(example(), example(thinking=False))
    (batch,) = some.one_pass(2, 1024)
    hidden = torch.randn(*batch.input_ids.shape, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(TOKENIZER.vocab_size, 8, dtype=torch.float64)
    loss, tokens = cross_entropy(hidden, weight, batch.targets)
    loss.backward()
    learned = batch.targets != NO_TARGET
    assert tokens == int(learned.sum()) == sum(int((e.kinds > 0).sum()) for e in some.examples)
    assert (hidden.grad[~learned] == 0).all() and (hidden.grad[learned] != 0).any(-1).all()
    ids = np.concatenate([e.ids[1:] for e in (some.examples[p.document] for p in batch.ids if p)])
    kinds = np.concatenate([e.kinds[1:] for e in (some.examples[p.document] for p in batch.ids if p)])
    assert batch.targets[learned].tolist() == ids[kinds > 0].tolist()


def test_problem_07_numerator_and_denominator_are_of_one_mask_and_an_empty_one_costs_nothing():
    some = source(example())
    (batch,) = some.one_pass(1, 600)
    parts = [some.one_pass(1, 600, (kind,))[0] for kind in SAMPLED]
    assert sum(count_targets(part.targets) for part in parts) == count_targets(batch.targets)
    hidden = torch.randn(*batch.input_ids.shape, 8, requires_grad=True)
    weight = torch.randn(TOKENIZER.vocab_size, 8)
    losses = [cross_entropy(hidden, weight, part.targets)[0] for part in parts]
    torch.testing.assert_close(sum(losses), cross_entropy(hidden, weight, batch.targets)[0])
    nothing = some.batch(some.pack([0], 600), 600, ())
    loss, tokens = cross_entropy(hidden, weight, nothing.targets)
    step_loss(loss, tokens).backward()
    assert tokens == 0 and loss == 0 and (hidden.grad == 0).all()


def test_problem_09_the_end_token_is_learned_and_nothing_after_it():
    one = example()
    ends = np.flatnonzero(one.ids == TOKENIZER.end_of_msg_id)
    learned = ends[one.kinds[ends] == Kind.END]
    assert len(learned) == 3 and learned[-1] == len(one.ids) - 1
    assert (one.kinds[learned[:-1] + 1] == Kind.GIVEN).all()
    assert TOKENIZER.eos_id not in one.ids


def test_problem_10_a_pad_that_is_the_end_token_is_still_padding():
    ones = [example(), example(thinking=False)]
    (ours,) = source(*ones).one_pass(2, 700)
    (same,) = source(*ones, pad=TOKENIZER.end_of_msg_id).one_pass(2, 700)
    assert torch.equal(ours.targets, same.targets) and not torch.equal(ours.input_ids, same.input_ids)
    ends = int((same.targets == TOKENIZER.end_of_msg_id).sum())
    assert ends == 6 and (same.input_ids[~same.filled] == TOKENIZER.end_of_msg_id).all()


# ---------------------------------------------------------------------- histories


def wandering(random):
    """A conversation of random turns, texts that spell merges and markers, thoughts that are empty or not."""
    words = ["he", "llo", "hello", " message", "<|end_of_msg|>", "think", "\n", "12", ""]
    messages = []
    for _ in range(random.randint(2, 6)):
        said = "".join(random.choices(words, k=random.randint(0, 4)))
        thought = "".join(random.choices(words, k=random.randint(0, 3)))
        messages.append({"role": random.choice(["user", "system"]), "content": said})
        messages.append({"role": "assistant", "content": said[::-1], "reasoning_content": thought})
        if random.random() < 0.6:
            messages[-1]["tool_calls"] = [call("get", {"k": said}, "a"), call("set", {"k": thought, "v": 1}, "b")]
            messages += [{"role": "tool", "content": thought, "tool_call_id": "a"}]
            messages += [{"role": "tool", "content": said, "tool_call_id": "b"}]
    return messages


@pytest.mark.parametrize("thinking", [True, False])
def test_problem_17_a_history_only_grows_at_its_end(thinking):
    for seed in range(30):
        messages = wandering(Random(seed))
        whole = [
            encode(render(messages[:k], TOOLS, thinking, add_generation_prompt=False), TOKENIZER)
            for k in range(len(messages) + 1)
        ]
        for shorter, longer in zip(whole, whole[1:]):
            assert longer[: len(shorter)] == shorter and len(longer) > len(shorter)


@pytest.mark.parametrize("thinking", [True, False])
def test_problems_04_and_18_the_row_is_the_prompts_and_answers_as_they_were_said(thinking):
    """What a sampler would have read and said, turn by turn, is the training row, id for id."""
    for seed in range(30):
        messages = wandering(Random(seed))
        ids, learned = [], []
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = encode(render(messages[:k], TOOLS, thinking), TOKENIZER)
                assert prompt[: len(ids)] == ids
                said = encode(answer(message, thinking), TOKENIZER)
                learned += [False] * (len(prompt) - len(ids)) + [True] * len(said)
                ids = prompt + said
        one = Encoder(TOKENIZER)(row(messages, thinking=thinking))
        assert one.ids[: len(ids)].tolist() == ids
        assert (one.kinds[: len(ids)] > 0).tolist() == learned and not one.kinds[len(ids) :].any()


# ---------------------------------------------------------------------- files


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_read_with_their_place(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": long_chat(), "effort": "max", "id": 7}, {"messages": long_chat()})
    one, two = read_conversations(path)
    assert (one.effort, two.effort, one.tools) == ("max", None, None) and one.folder == tmp_path
    assert one.where == f"{path}: line 1" and two.where == f"{path}: line 2"


@pytest.mark.parametrize(
    "bad, message",
    [
        ([], "the row is .*; allowed: an object with messages"),
        ({"messages": []}, r"messages is \[\]; allowed: a list of at least one message"),
        ({"text": "x"}, "messages is None; allowed: a list"),
        ({"messages": [{"role": "me"}]}, r"messages\[0\].role is 'me'; allowed: system, user, assistant, tool"),
        ({"messages": long_chat(), "effort": "medium"}, "effort is 'medium'; allowed: low, high, max"),
        ({"messages": long_chat(), "tools": {"a": 1}}, r"tools is \{'a': 1\}; allowed: a list of tools"),
        ({"messages": long_chat(), "thinking": 3}, "thinking is 3; allowed: true, false"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages has no assistant's message"),
        ({"messages": [{"role": "assistant", "content": 3}]}, r"messages\[0\].content is 3; allowed: a string"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image", "image": "http://x/y.png"}]}]},
            "picture 0 is 'http://x/y.png'; allowed: a file's path or a data URL",
        ),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path, bad, message):
    path = write(tmp_path / "a.jsonl", {"messages": long_chat()}, bad)
    with pytest.raises(ValueError, match=f"{path}: line 2: {message}"):
        list(map(Encoder(TOKENIZER), read_conversations(path)))


def test_bad_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [}\n')
    with pytest.raises(ValueError, match=r"a.jsonl: line 1: no JSON"):
        list(read_conversations(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"data: no file .*b.jsonl"):
        list(read_conversations(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match=r"ends in '.txt'; allowed: .jsonl, .parquet"):
        list(read_conversations(Path("a.txt")))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"a.parquet: not readable as parquet"):
        list(read_conversations(tmp_path / "a.parquet"))


def test_parquet_gives_the_same_as_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    simple = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]
    table = pyarrow.table({"messages": [simple], "tools": [json.dumps(TOOLS)], "effort": ["low"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (found,) = read_conversations(tmp_path / "a.parquet")
    assert found.where.endswith("a.parquet: row 1")
    assert found.render() == row(simple, effort="low").render()


# ---------------------------------------------------------------------- pictures


def picture(width, height):
    PIL = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    PIL.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def test_pictures_stand_where_the_tower_looks_for_them(tmp_path):
    (tmp_path / "p.png").write_bytes(picture(60, 30))
    url = "data:image/png;base64," + base64.b64encode(picture(30, 90)).decode()
    content = [
        {"type": "text", "text": "<|media_pad|>"},
        {"type": "image", "image": "p.png"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]
    one = Encoder(TOKENIZER)(conversation_of({"messages": messages}, "here", tmp_path))
    pads = np.flatnonzero(one.ids == TOKENIZER.special["<|media_pad|>"])
    assert len(pads) == sum(placed.image.tokens for placed in one.pictures)
    assert [placed.token for placed in one.pictures] == [pads[0], pads[one.pictures[0].image.tokens]]
    (batch,) = source(example(), one).one_pass(2, 1200)
    at = batch.pictures.places.tolist()
    assert (batch.input_ids.flatten()[at] == TOKENIZER.special["<|media_pad|>"]).all()
    assert batch.pictures.grid_thw.prod(1).sum() == len(batch.pictures.pixel_values) == one.patches
    assert TOKENIZER.special["<|media_pad|>"] not in batch.targets


# ---------------------------------------------------------------------- rows


def test_conversations_are_never_cut_and_rows_say_where_they_begin():
    some = source(*(example(thinking=bool(i % 2)) for i in range(5)))
    longest = int(some.lengths.max()) - 1
    batches = some.one_pass(2, longest)
    segments = [piece for batch in batches for piece in batch.ids if piece]
    assert sorted(piece.document for piece in segments) == list(range(5)) and {p.offset for p in segments} == {0}
    for batch in batches:
        lengths = batch.cu_seqlens.diff().tolist()
        assert [n for n, piece in zip(lengths, batch.ids) if piece] == [
            len(some.examples[piece.document].ids) - 1 for piece in batch.ids if piece
        ]
    assert sum(some.counts().values()) == int(some.lengths.sum())
    assert some.digest == source(*some.examples).digest != source(*some.examples[:4]).digest
