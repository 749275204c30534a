"""Fine-tuning: it learns what is sampled, packed rows are apart, and a run that was killed goes on exactly."""

import json
from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.data.chat import OURS, Sentences
from nanok3.model.decoder import K3
from nanok3.posttrain.conversations import SAMPLED, Encoder, conversation_of
from nanok3.posttrain.domains import SENTENCES, small_tokenizer
from nanok3.posttrain.sft import (
    answering,
    by_channel,
    finish,
    fitting,
    is_held_out,
    lessons,
    prompts_of,
    schedule,
    token_sizes,
    trainer_for,
    world_lessons,
)
from nanok3.posttrain.sft_settings import DEFAULTS, WORLD
from nanok3.serve.run_folder import open_model
from nanok3.train.loss import cross_entropy
from nanok3.train.run_record import read_run

TOKENIZER = small_tokenizer()
QUICK = replace(WORLD, steps=6, batch_size=1, seq_len=256, precision="float32", eval_every=0, save_every=0, lr=2e-2)


def fresh(seed=0):
    torch.manual_seed(seed)
    return K3(K3Config.tiny().at_depth(2).with_vocabulary(TOKENIZER.vocab_size))


def chat(number):
    told = {"role": "assistant", "content": f"{number}", "reasoning_content": "so" if number % 2 else ""}
    return conversation_of({"messages": [{"role": "user", "content": f"say {number}"}, told]}, f"row {number}")


def taught(count=12):
    return lessons(map(chat, range(count)), map(chat, range(count, count + 3)), TOKENIZER, 256)


def run(out, steps=6, until=None, resume=False, **changes):
    trainer = trainer_for(fresh(), TOKENIZER, taught(), replace(QUICK, steps=steps, **changes), out, str, 3, resume)
    while trainer.progress.step < (until or steps):
        trainer._advance(trainer.train_step(), 1.0)
    return trainer


def test_it_learns_and_says_so(tmp_path):
    trainer = run(tmp_path, steps=15)
    before, after = (read_run(tmp_path).kind("train")[at]["loss"] for at in (0, -1))
    assert after < 0.5 * before
    facts = read_run(tmp_path).kind("conversations")[0]
    assert facts["train"]["conversations"] == 12 and facts["held_out"]["conversations"] == 3
    assert facts["train"]["end"] == 12 * 4 and facts["train"]["given"] > facts["train"]["think"] > 0
    folder = finish(trainer, TOKENIZER, SENTENCES)
    opened = open_model(folder)
    assert opened.stage == "sft" and opened.answers and Sentences.of(folder) == SENTENCES
    assert "What was taught" in (tmp_path / "report.html").read_text()
    for prompt, said in answering(taught().held_out, TOKENIZER, 1)(trainer.model):
        assert prompt.endswith('role="assistant"<|sep|><|open|>think<|sep|>') and said


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    whole = run(tmp_path / "whole", qat="w4a16")
    run(tmp_path / "cut", until=4, qat="w4a16").save()
    resumed = run(tmp_path / "cut", qat="w4a16", resume=True)
    assert resumed.progress.step == 6
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match=r"holds a run; add --resume"):
        run(tmp_path / "cut")


def test_packed_conversations_do_not_see_each_other():
    """The loss of a packed row is the sum of its conversations' own."""
    model, held = fresh().eval(), taught().train
    (row,) = held.one_pass(4, 700)[:1]
    assert sum(piece is not None for piece in row.ids) > 3

    def loss(batch):
        with torch.no_grad():
            hidden = model.hidden_states(batch.input_ids.view(1, -1), cu_seqlens=batch.cu_seqlens)
            return cross_entropy(hidden, model.lm_head.weight, batch.targets.view(1, -1))

    alone = [
        loss(
            held.batch([[next(p for r in held.pack([i.document], 700) for p in r)]], int(held.lengths[i.document]) - 1)
        )
        for i in row.ids
        if i
    ]
    together, tokens = loss(row)
    assert tokens == sum(n for _, n in alone)
    torch.testing.assert_close(together, sum(l for l, _ in alone), rtol=1e-5, atol=1e-4)


def test_held_out_loss_by_channel_adds_up():
    slices = by_channel(taught().held_out, 2, 256)
    assert list(slices) == ["all", "think", "response", "end"]
    counts = {name: sum(int((batch.targets >= 0).sum()) for batch in batches) for name, batches in slices.items()}
    assert counts["all"] == counts["think"] + counts["response"] + counts["end"]
    assert by_channel(lessons([chat(1)], [], TOKENIZER, 256).held_out, 1, 256) == {}


def test_a_conversation_too_long_for_a_row_is_refused_or_counted():
    long = conversation_of({"messages": [{"role": "assistant", "content": "x" * 300}]}, "a.jsonl: line 7")
    with pytest.raises(ValueError, match=r"a.jsonl: line 7: messages come to \d+ tokens; a row of seq_len = 256 holds"):
        lessons([chat(1), long], [], TOKENIZER, 256)
    assert lessons([chat(1), long], [], TOKENIZER, 256, skip_long=True).skipped == 1
    exact = Encoder(TOKENIZER)(chat(1))
    assert fitting([exact], len(exact.ids) - 1, False) == ([exact], 0)
    assert fitting([exact], len(exact.ids) - 2, True) == ([], 1)
    with pytest.raises(ValueError, match="there are no conversations to train on"):
        lessons([], [], TOKENIZER, 256)


def test_sides_by_content_and_length_by_epochs():
    rows = [chat(number) for number in range(400)]
    held = [is_held_out(row, 0.25) for row in rows]
    assert 60 < sum(held) < 140 and held == [is_held_out(row, 0.25) for row in rows]
    assert schedule(DEFAULTS, 100, 2.0).steps == 25 and schedule(replace(DEFAULTS, steps=7), 100, 2.0).steps == 7
    assert schedule(replace(DEFAULTS, minutes=1.0), 100, 2.0).steps is None
    with pytest.raises(ValueError, match="epochs is 0; it must be above 0"):
        schedule(DEFAULTS, 100, 0)


def test_a_model_of_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size is 1024; the tokenizer has \d+ ids"):
        trainer_for(K3(K3Config.tiny().at_depth(1)), TOKENIZER, taught(), QUICK, tmp_path)


def test_the_small_world_is_other_tasks_held_out():
    world = world_lessons(["general", "coding"], 30, 0.15, 0, 512)
    assert (len(world.train), len(world.held_out)) == (60, 6) and world.sentences == SENTENCES != OURS
    ours, theirs = ({tuple(ids) for ids, _ in prompts_of(side, 99)} for side in (world.train, world.held_out))
    assert not ours & theirs
    with pytest.raises(ValueError, match="domains: 'x'; allowed: general, agent, coding"):
        world_lessons(["x"], 3, 0.1, 0, 512)


def test_sizes_of_tokens_are_bytes_and_markup_is_none():
    sizes = token_sizes(TOKENIZER)
    assert len(sizes) == TOKENIZER.vocab_size and sizes[TOKENIZER.end_of_msg_id] == 0
    assert sizes[TOKENIZER.encode("assistant")[0]] == 9 and json.dumps(SAMPLED) == "[1, 2, 3, 4]"
