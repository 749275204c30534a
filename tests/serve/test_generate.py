"""Generation through the state against whole forward passes, and what is shown of it."""

from __future__ import annotations

import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nanok3.serve.generate as generation
from nanok3.config import K3Config
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.cache import KDAState, LatentCache, ModelState
from nanok3.model.decoder import K3
from nanok3.serve.generate import StopStrings, generate, score, stream, unnamed_ids, visible
from nanok3.serve.sampler import SamplingParams, new_generator

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = {257: -math.inf, 258: -math.inf}
"""A bias without which a random model may end at once: the ids of [EOS] and <|end_of_msg|>."""

ASCII = dict.fromkeys(range(128, 512), -math.inf)
"""A bias with which every token is a character."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes and the reserved ids, nothing learned."""
    return Tokenizer({bytes([byte]): byte for byte in range(256)})


@pytest.fixture(scope="module")
def model() -> K3:
    """Two KDA layers and one MLA layer in float64, with weights large enough for a lively distribution."""
    torch.manual_seed(1)
    cfg = K3Config.tiny(initializer_range=0.2).at_depth(3).with_vocabulary(512)
    return K3(cfg).double().eval()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes | list[int]], None]:
    """scripted(ids) lets the sampler choose these ids one by one, whatever the model says; then comes Ctrl-C."""

    def script(ids: bytes | list[int]) -> None:
        rest = iter(ids)

        def sample(*_: object) -> tuple[int, float]:
            for token in rest:
                return token, 0.0
            raise KeyboardInterrupt

        monkeypatch.setattr(generation, "sample", sample)

    return script


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, even where the tests run in the background and ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def whole_forward_greedy(model: K3, tokenizer: Tokenizer, ids: list[int], count: int) -> list[int]:
    """The slow reference: a full forward pass for every token."""
    ids, allowed = list(ids), torch.ones(model.cfg.vocab_size, dtype=torch.bool)
    allowed[unnamed_ids(tokenizer, model.cfg.vocab_size)] = False
    allowed[list(ENDLESS)] = False
    with torch.no_grad():
        for _ in range(count):
            last = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(last.masked_fill(~allowed, -torch.inf).argmax()))
    return ids[-count:]


def kda_bytes(state: ModelState) -> list[int]:
    """What the KDA layers really hold, storage behind views included."""
    kda = [layer for layer in state.layers if isinstance(layer, KDAState)]
    return [t.untyped_storage().nbytes() for layer in kda for t in (layer.conv, layer.recurrent)]


# ---------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
def test_greedy_equals_whole_forwards_in_any_chunks(model: K3, tokenizer: Tokenizer, chunk: int) -> None:
    params = replace(GREEDY, logit_bias=ENDLESS)
    done = generate(model, tokenizer, "It was a dark night", params, prefill_chunk=chunk)
    assert done.ids == whole_forward_greedy(model, tokenizer, list(b"It was a dark night"), 12)
    assert (done.finish_reason, done.prompt_tokens, len(done.logprobs)) == ("length", 19, 12)
    assert done.state.tokens == 19 + 11  # all but the last
    assert tokenizer.decode(done.ids).rstrip("\N{REPLACEMENT CHARACTER}") == done.text.rstrip(
        "\N{REPLACEMENT CHARACTER}"
    )


def test_a_conversation_continues_where_its_state_stands(model: K3, tokenizer: Tokenizer) -> None:
    params = replace(GREEDY, logit_bias=ENDLESS, max_tokens=5)
    first = generate(model, tokenizer, "abc", params)
    more = list(b" and then")
    second = generate(model, tokenizer, first.ids[-1:] + more, params, state=first.state)
    assert second.state is first.state
    assert second.ids == whole_forward_greedy(model, tokenizer, list(b"abc") + first.ids + more, 5)


def test_logprobs_are_those_of_a_whole_forward(model: K3, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=10, logit_bias=ENDLESS)
    done = generate(model, tokenizer, "abc", params)
    ids = list(b"abc") + done.ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, 2:-1]
    logits[:, unnamed_ids(tokenizer, 512) + list(ENDLESS)] = -torch.inf
    logp = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(done.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs, dtype=torch.float64), logp, atol=1e-9, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_score_equals_a_whole_forward(model: K3, chunk: int) -> None:
    ids = list(b"scores of a text")
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(model, ids, chunk), expected, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="at least 2"):
        score(model, [1])


def test_seeds_decide(model: K3, tokenizer: Tokenizer) -> None:
    def ids(seed: int | None) -> list[int]:
        return generate(model, tokenizer, "seed", SamplingParams(seed=seed, max_tokens=4, logit_bias=ENDLESS)).ids

    assert ids(5) == ids(5) != ids(6)


def test_a_shared_generator_goes_on(model: K3, tokenizer: Tokenizer) -> None:
    params, shared = SamplingParams(seed=5, max_tokens=4, logit_bias=ENDLESS), new_generator(5)
    first = generate(model, tokenizer, "seed", params, generator=shared)
    assert first.ids == generate(model, tokenizer, "seed", params).ids
    assert first.ids != generate(model, tokenizer, "seed", params, generator=shared).ids


def test_penalties_reach_the_sampler(model: K3, tokenizer: Tokenizer) -> None:
    params = replace(GREEDY, logit_bias=ENDLESS, presence_penalty=1e6, max_tokens=10)
    assert len(set(generate(model, tokenizer, "aaaa", params).ids)) == 10
    said = generate(model, tokenizer, "a", replace(params, presence_penalty=0.0, repetition_penalty=1e6)).ids
    assert ord("a") not in said


def test_ids_without_a_name_are_never_said(model: K3, tokenizer: Tokenizer) -> None:
    unnamed = unnamed_ids(tokenizer, 512)
    assert len(unnamed) == 256 - 16 and tokenizer.eos_id not in unnamed
    assert unnamed_ids(tokenizer, 515)[-3:] == [512, 513, 514]
    params = SamplingParams(seed=0, temperature=50.0, max_tokens=40, logit_bias=ENDLESS)
    assert not set(generate(model, tokenizer, "x", params).ids) & set(unnamed)


def test_kda_layers_keep_the_same_bytes_and_mla_layers_one_row_a_token(model: K3, tokenizer: Tokenizer) -> None:
    params = replace(GREEDY, logit_bias=ENDLESS, max_tokens=2)
    short = generate(model, tokenizer, "a", params).state
    long = generate(model, tokenizer, "a" * 300, replace(params, max_tokens=30), prefill_chunk=128).state
    assert kda_bytes(long) == kda_bytes(short)
    rows = [layer.latents.shape[1] for layer in long.layers if isinstance(layer, LatentCache)]
    assert rows == [300 + 29] and long.nbytes - short.nbytes == (329 - 2) * model.cfg.latent_cache_size * 8


def test_only_the_last_row_goes_through_the_head(model: K3, tokenizer: Tokenizer) -> None:
    rows: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _module, inputs, _out: rows.append(inputs[0].shape[1]))
    generate(model, tokenizer, "a" * 40, replace(GREEDY, max_tokens=2, logit_bias=ENDLESS), prefill_chunk=16)
    handle.remove()
    assert set(rows) == {1}


# ---------------------------------------------------------------------- where it begins and ends


def test_an_empty_prompt_reads_the_document_boundary(model: K3, tokenizer: Tokenizer) -> None:
    params = replace(GREEDY, logit_bias=ENDLESS)
    from_nothing = generate(model, tokenizer, "", params)
    assert from_nothing.ids == generate(model, tokenizer, [tokenizer.eos_id], params).ids
    assert from_nothing.prompt_tokens == 1
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, tokenizer, "", params, state=from_nothing.state)


def test_names_of_control_tokens_in_a_prompt_stay_text(model: K3, tokenizer: Tokenizer) -> None:
    running = stream(model, tokenizer, "<|end_of_msg|>", GREEDY)
    assert running.prompt == list(b"<|end_of_msg|>")


@pytest.mark.parametrize("end", [257, 258, ord("!")])
def test_end_ids_end_and_are_not_shown(model: K3, tokenizer: Tokenizer, scripted, end: int) -> None:  # type: ignore[no-untyped-def]
    scripted([*b"Yes", end, *b"more"])
    done = generate(model, tokenizer, "?", SamplingParams(stop_ids=(ord("!"),)))
    assert (done.text, done.finish_reason, done.ids) == ("Yes", "stop", [*b"Yes", end])


def test_the_context_ends_an_answer(model: K3, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "cfg", replace(model.cfg, max_position_embeddings=16))
    params = SamplingParams(seed=0, max_tokens=100, logit_bias=ENDLESS)
    done = generate(model, tokenizer, "a" * 12, params)
    assert (len(done.ids), done.finish_reason, done.state.tokens) == (4, "length", 15)
    with pytest.raises(ValueError, match="max_position_embeddings is 16"):
        generate(model, tokenizer, "a" * 16, params)
    with pytest.raises(ValueError, match="max_position_embeddings is 16"):
        generate(model, tokenizer, "a", params, state=done.state)


def test_what_does_not_fit_is_refused(model: K3, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"id 512.*0 to 511"):
        generate(model, tokenizer, [1, 512], GREEDY)
    with pytest.raises(ValueError, match="2 sequences"):
        generate(model, tokenizer, "a", GREEDY, state=model.new_state(2))
    with pytest.raises(ValueError, match="prefill_chunk is 0"):
        generate(model, tokenizer, "a", GREEDY, prefill_chunk=0)
    larger = Tokenizer({**{bytes([byte]): byte for byte in range(256)}, b"ab": 256})
    with pytest.raises(ValueError, match=r"513 ids, the model only 512"):
        generate(model, larger, "a", GREEDY)


def test_broken_weights_are_an_error(tokenizer: Tokenizer, model: K3, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.nn.Parameter(torch.full_like(model.lm_head.weight, math.nan))
    monkeypatch.setitem(model.lm_head._parameters, "weight", broken)
    with pytest.raises(ValueError, match="NaN"):
        generate(model, tokenizer, "a", GREEDY)


# ---------------------------------------------------------------------- what is shown


def test_no_half_character_is_shown(model: K3, tokenizer: Tokenizer, scripted) -> None:  # type: ignore[no-untyped-def]
    text = "a€b😀c"
    scripted(text.encode())
    pieces: list[str] = []
    done = generate(model, tokenizer, "?", SamplingParams(max_tokens=len(text.encode())), on_text=pieces.append)
    assert pieces == list(text) and done.text == text


def test_an_unfinished_character_at_the_end_is_left_out(model: K3, tokenizer: Tokenizer, scripted) -> None:  # type: ignore[no-untyped-def]
    scripted("a😀".encode())
    done = generate(model, tokenizer, "?", SamplingParams(max_tokens=4))
    assert (done.text, done.finish_reason, len(done.ids)) == ("a", "length", 4)


def test_a_stop_string_across_tokens_is_never_shown(model: K3, tokenizer: Tokenizer, scripted) -> None:  # type: ignore[no-untyped-def]
    scripted(b"one\nQuery\nQuestion: two")
    pieces: list[str] = []
    done = generate(model, tokenizer, "?", SamplingParams(stop=("\nQuestion:",)), on_text=pieces.append)
    assert "".join(pieces) == done.text == "one\nQuery"
    assert done.finish_reason == "stop" and done.ids == list(b"one\nQuery\nQuestion:")


def test_what_never_became_a_stop_string_is_shown_at_the_end(model: K3, tokenizer: Tokenizer, scripted) -> None:  # type: ignore[no-untyped-def]
    for ids, reason in ((b"go STO", "length"), ([*b"go STO", 257], "stop")):
        scripted(ids)
        pieces: list[str] = []
        done = generate(
            model, tokenizer, "?", SamplingParams(max_tokens=len(ids), stop=("STOP",)), on_text=pieces.append
        )
        assert "".join(pieces) == done.text == "go STO" and done.finish_reason == reason


def cuts(text: str) -> Iterator[list[str]]:
    for borders in itertools.product([False, True], repeat=len(text) - 1):
        pieces = [text[0]]
        for character, border in zip(text[1:], borders):
            if border:
                pieces.append(character)
            else:
                pieces[-1] += character
        yield pieces


@pytest.mark.parametrize(
    "text, stops, shown",
    [
        ("xabcdy", ("abcd", "c"), "xab"),  # c is complete first
        ("xabcdy", ("bcd", "abcd"), "x"),  # complete at once: the longer
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("abc", ("abcd",), "abc"),
        ("abab", (), "abab"),
    ],
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stops: tuple[str, ...], shown: str) -> None:
    for pieces in cuts(text):
        matcher = StopStrings(stops)
        given_out = [matcher.push(piece) for piece in pieces]
        assert "".join(given_out) + matcher.flush() == shown, pieces


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_against_a_search_of_every_beginning(pieces: list[str], stops: list[str]) -> None:
    text, expected = "".join(pieces), None
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            expected = text[: end - max(map(len, found))]
            break
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    assert shown == (text if expected is None else expected)
    assert (matcher.found is None) == (expected is None)


def test_control_characters_are_pictures_on_a_terminal() -> None:
    assert visible("a\x1b[2J\nb\tc\r\x7f\x9b€") == "a␛[2J\nb\tc␍␡\N{REPLACEMENT CHARACTER}€"


# ---------------------------------------------------------------------- Ctrl-C


def test_interrupt_while_showing_keeps_what_was_said(model: K3, tokenizer: Tokenizer) -> None:
    params = replace(GREEDY, logit_bias=ASCII)
    whole = generate(model, tokenizer, "abc", params)
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    cut = generate(model, tokenizer, "abc", params, on_text=show)
    assert cut.finish_reason == "interrupted"
    assert cut.text == "".join(pieces) == whole.text[:4] and cut.ids == whole.ids[:4]
    rest = generate(model, tokenizer, cut.ids[-1:], replace(params, max_tokens=8), state=cut.state)
    assert cut.ids + rest.ids == whole.ids


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_in_the_middle_of_a_forward_pass_leaves_a_whole_state(model: K3, tokenizer: Tokenizer) -> None:
    params = replace(GREEDY, logit_bias=ASCII)
    whole = generate(model, tokenizer, "abc", params)
    calls = itertools.count()

    def strike(*_: object) -> None:
        if next(calls) == 5:  # the prompt, four tokens, and now in the second of three layers
            signal.raise_signal(signal.SIGINT)

    handle = model.model.layers[1].register_forward_hook(strike)
    cut = generate(model, tokenizer, "abc", params)
    handle.remove()
    assert cut.finish_reason == "interrupted" and 0 < len(cut.ids) < 12
    assert cut.state.tokens == 3 + len(cut.ids) - 1
    assert cut.text == whole.text[: len(cut.ids)]
    rest = generate(model, tokenizer, cut.ids[-1:], replace(params, max_tokens=12 - len(cut.ids)), state=cut.state)
    assert cut.ids + rest.ids == whole.ids


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_while_the_prompt_is_read(model: K3, tokenizer: Tokenizer) -> None:
    calls = itertools.count()

    def strike(*_: object) -> None:
        if next(calls) == 1:
            signal.raise_signal(signal.SIGINT)

    handle = model.model.layers[1].register_forward_hook(strike)
    cut = generate(model, tokenizer, "a" * 10, replace(GREEDY, logit_bias=ENDLESS), prefill_chunk=3)
    handle.remove()
    assert (cut.text, cut.ids, cut.finish_reason) == ("", [], "interrupted")
    assert cut.state.tokens == cut.prompt_tokens == 6
    rest = generate(model, tokenizer, "a" * 4, replace(GREEDY, logit_bias=ENDLESS), state=cut.state)
    assert rest.ids == whole_forward_greedy(model, tokenizer, list(b"a" * 10), 12)


def test_a_signal_meets_the_handler_that_stood_before(model: K3, tokenizer: Tokenizer) -> None:
    """A trainer that only notes the signal is told, and the sample goes on."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        hook = model.model.layers[0].register_forward_hook(lambda *_: noted or signal.raise_signal(signal.SIGINT))
        done = generate(model, tokenizer, "abc", replace(GREEDY, logit_bias=ENDLESS))
        hook.remove()
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [signal.SIGINT] and done.finish_reason == "length"


def test_generation_works_outside_the_main_thread(model: K3, tokenizer: Tokenizer) -> None:
    results: list[list[int]] = []
    params = replace(GREEDY, logit_bias=ENDLESS, max_tokens=3)
    worker = threading.Thread(target=lambda: results.append(generate(model, tokenizer, "abc", params).ids))
    worker.start()
    worker.join()
    assert results == [generate(model, tokenizer, "abc", params).ids]


def test_an_interrupt_shows_what_was_held_back(model: K3, tokenizer: Tokenizer, scripted) -> None:  # type: ignore[no-untyped-def]
    scripted(b"go STO")
    pieces: list[str] = []
    cut = generate(model, tokenizer, "?", SamplingParams(stop=("STOP",)), on_text=pieces.append)
    assert "".join(pieces) == cut.text == "go STO"
    assert (cut.finish_reason, cut.ids) == ("interrupted", list(b"go STO"))


def test_rates_count_what_they_say(model: K3, tokenizer: Tokenizer) -> None:
    done = generate(model, tokenizer, "abc", replace(GREEDY, logit_bias=ENDLESS))
    assert done.prefill_rate == pytest.approx(3 / done.seconds_prefill)
    assert done.decode_rate == pytest.approx(11 / done.seconds_decode)
    assert replace(done, ids=[]).decode_rate == 0


def test_a_training_model_is_left_as_it_was(tokenizer: Tokenizer) -> None:
    trained = K3(K3Config.tiny().at_depth(3).with_vocabulary(512)).train()
    done = generate(trained, tokenizer, "abc", replace(GREEDY, max_tokens=2))
    loss: Tensor = trained(torch.tensor([[1, 2, 3]])).logits.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert trained.training and trained.lm_head.weight.grad is not None
    assert not any(tensor.requires_grad for _, tensor in done.state.tensors())
