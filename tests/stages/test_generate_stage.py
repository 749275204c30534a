"""`nanok3 generate` and `nanok3 chat` as commands: prompts from files, answers kept, a conversation over a pipe."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

import nanok3
from nanok3.data.tokenizer import Tokenizer
from nanok3.serve import generate as generation
from nanok3.serve.run_folder import open_model
from nanok3.stages import chat as chat_stage
from nanok3.stages.chat import BASE, Chat, ChatArgs, command
from nanok3.stages.generate import GenerateArgs, main, printer, read_prompts_file

BYTES = {bytes([byte]): byte for byte in range(256)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a random model that knows bytes only."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    torch.manual_seed(1)
    cfg = nanok3.K3Config.tiny(initializer_range=0.2).at_depth(2).with_vocabulary(512)
    nanok3.save(nanok3.K3(cfg), folder / "model")
    Tokenizer(BYTES).save(folder / "model")
    (folder / "model" / "nanok3.json").write_text('{"stage": "pretrain"}')
    return folder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def arguments(run: Path, **flags: Any) -> GenerateArgs:
    return GenerateArgs(model=run, **({"max_tokens": 6, "seed": 1} | flags))


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Ctrl-C while the token after `tokens` of them is sampled."""
    sample, left = generation.sample, iter(range(tokens))

    def interrupted(*args: Any) -> tuple[int, float]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return sample(*args)

    monkeypatch.setattr(generation, "sample", interrupted)


# ---------------------------------------------------------------------- generate


def test_text_goes_to_stdout_and_speed_to_stderr(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_model(run)
    args = arguments(run, text="Once", temperature=0.0)
    expected = generation.generate(opened.model, opened.tokenizer, "Once", args.sampling())
    main(args)
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert "prompt: 4 tokens" in err and f"answer: {len(expected.ids)} tokens" in err and "seed 1" in err
    assert err.count("tokens/s") == 2


def test_json_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(run, prompt="Once", json=True))
    record = json.loads(capsys.readouterr().out)
    assert record["prompt"] == "Once" and record["settings"]["seed"] == 1
    assert (record["index"], record["prompt_tokens"]) == (0, 4) and 0 < record["completion_tokens"] <= 6


def test_a_seed_is_drawn_and_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(run, text="Once", seed=None, json=True))
    out, err = capsys.readouterr()
    drawn = json.loads(out)["settings"]["seed"]
    assert f"seed {drawn}" in err
    main(arguments(run, text="Once", seed=drawn, json=True))
    assert json.loads(capsys.readouterr().out)["text"] == json.loads(out)["text"]


def test_a_prompt_from_stdin(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines"))
    main(arguments(run, text="-", json=True))
    assert json.loads(capsys.readouterr().out)["prompt"] == "two\nlines"


def test_answers_do_not_depend_on_the_order_of_the_prompts(run: Path, tmp_path: Path) -> None:
    prompts = ["one", "two", "three"]
    (tmp_path / "a.txt").write_text("\n".join(prompts))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in reversed(prompts)))
    for name in ("a.txt", "b.jsonl"):
        main(arguments(run, prompts_file=tmp_path / name, out=tmp_path / f"{name}.out"))
    first = {r["prompt"]: r["text"] for r in answers(tmp_path / "a.txt.out")}
    second = {r["prompt"]: r["text"] for r in answers(tmp_path / "b.jsonl.out")}
    assert first == second and len(set(first.values())) == 3
    assert [r["index"] for r in answers(tmp_path / "b.jsonl.out")] == [0, 1, 2]


def test_an_interrupt_keeps_what_was_said_and_resume_does_the_rest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\nthree\n")
    flags = {"prompts_file": tmp_path / "p.txt", "temperature": 0.0, "seed": None, "stop": ("\0",)}
    main(arguments(run, **flags, out=tmp_path / "whole"))
    whole = answers(tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, whole[0]["completion_tokens"] + 2)
        with pytest.raises(KeyboardInterrupt):
            main(arguments(run, **flags, out=tmp_path / "out"))
    partial = answers(tmp_path / "out.partial")
    assert [r["finish_reason"] for r in partial] == [whole[0]["finish_reason"], "interrupted"]
    assert partial[1]["completion_tokens"] == 2 and whole[1]["text"].startswith(partial[1]["text"])
    assert "interrupted" in capsys.readouterr().err and not (tmp_path / "out").exists()

    with pytest.raises(ValueError, match="--resume"):
        main(arguments(run, **flags, out=tmp_path / "out"))
    with pytest.raises(ValueError, match=r"max_tokens = 6, this run has 7"):
        main(arguments(run, **flags, max_tokens=7, out=tmp_path / "out", resume=True))
    with open(tmp_path / "out.partial", "a") as file:
        file.write('{"index": 2, "pro')  # a crash in the middle of a line
    main(arguments(run, **flags, out=tmp_path / "out", resume=True))
    resumed = answers(tmp_path / "out")
    assert [r["text"] for r in resumed] == [r["text"] for r in whole]
    assert resumed[0] == partial[0]  # not answered twice
    assert len({r["settings"]["seed"] for r in resumed}) == 1
    assert not (tmp_path / "out.partial").exists()


def test_a_model_that_does_not_load_leaves_no_traces(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        main(arguments(tmp_path / "missing", text="x", out=tmp_path / "new" / "out"))
    assert list((tmp_path / "new").iterdir()) == []
    main(arguments(run, text="x", out=tmp_path / "new" / "out"))
    assert len(answers(tmp_path / "new" / "out")) == 1


def test_resume_refuses_other_prompts_and_other_files(run: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    main(arguments(run, prompts_file=tmp_path / "p.txt", out=tmp_path / "out"))
    (tmp_path / "p.txt").write_text("another\n")
    with pytest.raises(ValueError, match="another prompt than number 0"):
        main(arguments(run, prompts_file=tmp_path / "p.txt", out=tmp_path / "out", resume=True))
    (tmp_path / "out").write_text("something else\n")
    with pytest.raises(ValueError, match="line 1 is no answer"):
        main(arguments(run, prompts_file=tmp_path / "p.txt", out=tmp_path / "out", resume=True))
    with pytest.raises(ValueError, match="--resume"):
        main(arguments(run, text="x", resume=True))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "\n \n", "holds no prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', "line 2 has no field `prompt`"),
        ("a.jsonl", '{"prompt": 3}\n', "line 1 has no field"),
        ("a.jsonl", "x\n", "line 1 is not JSON"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts_file(tmp_path / name)


def test_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts_file(tmp_path / "missing.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts_file(tmp_path / "latin.txt")
    (tmp_path / "a.txt").write_bytes("one \r\n\ntwo\u2028still two\n".encode())
    assert read_prompts_file(tmp_path / "a.txt") == ["one ", "two\u2028still two"]
    with pytest.raises(ValueError, match="more than once"):
        main(GenerateArgs(model=tmp_path, text="a", prompt="b"))


def test_flags(run: Path) -> None:
    line = [str(run), "Once", "--stop", "a", "--stop", "b", "--top-k", "5", "--temperature", "0.5", "--no-json"]
    args = tyro.cli(GenerateArgs, args=line)
    assert (args.model, args.text, args.stop, args.top_k) == (run, "Once", ("a", "b"), 5)
    assert (args.sampling().top_p, args.sampling().stop) == (0.95, ("a", "b"))
    with pytest.raises(ValueError, match="temperature"):
        main(arguments(run, text="a", temperature=-1.0))
    with pytest.raises(ValueError, match="threads is 0"):
        main(arguments(run, text="a", threads=0))


def test_help_does_not_wait_for_torch() -> None:
    for command_name in ("generate", "chat"):
        code = (
            "import sys; from nanok3.cli import main\n"
            f"try: main(['{command_name}', '--help'])\n"
            "except SystemExit: pass\n"
            "assert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0 and "--temperature" in done.stdout, done.stderr


def test_a_terminal_shows_control_characters_and_a_pipe_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.TextIOBase, text: str) -> None:
        monkeypatch.setattr(sys, "stdout", stream)
        printer()(text)

    terminal, pipe, narrow = Terminal(), io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    shown(terminal, "a\x1b[2J")
    shown(pipe, "a\x1b[2J")
    shown(narrow, "€")
    assert (terminal.getvalue(), pipe.getvalue()) == ("a␛[2J", "a\x1b[2J")
    assert narrow.buffer.getvalue() == b"?"  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- chat


@pytest.fixture
def chat(run: Path) -> Chat:
    args = ChatArgs(model=run, max_tokens=4, temperature=0.0, seed=1)
    return Chat(args.open(), args.sampling())


def test_turns_continue_one_text(chat: Chat) -> None:
    pieces: list[str] = []
    first = chat.say("Once upon", pieces.append)
    assert "".join(pieces) == first.text
    chat.say("a time", pieces.append)
    chat.say(" and", pieces.append)
    chat.say("", pieces.append)
    text = bytes(token for token in chat.history if token < 256)
    assert text.startswith(b"Once upon") and b"\na time" in text and b" and" in text and b"\n and" not in text
    assert chat.state.tokens in (len(chat.history) - 1, len(chat.history))

    alone = Chat(chat.opened, chat.params)  # the same ids, read at once
    alone.history = list(chat.history)
    assert alone.say("x", pieces.append).ids == chat.say("x", pieces.append).ids
    assert alone.history == chat.history


def test_an_end_token_does_not_end_the_text(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    eos = chat.opened.tokenizer.eos_id
    script = iter([*b"ab", eos, *b"cd", eos])
    monkeypatch.setattr(generation, "sample", lambda *_: (next(script), 0.0))
    chat.say("x", lambda piece: None)
    assert chat.history == list(b"xab") and chat.state.tokens == 3
    with pytest.raises(ValueError, match="the text ends here"):
        chat.say("", lambda piece: None)
    chat.say("y", lambda piece: None)
    assert chat.history == list(b"xab\nycd")


def test_an_interrupted_turn_is_kept_and_read_on(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        cut = chat.say("Once", lambda piece: None)
    assert cut.finish_reason == "interrupted" and chat.history == list(b"Once") + cut.ids
    again = Chat(chat.opened, chat.params)
    again.history = list(chat.history)
    assert chat.say(" more", lambda piece: None).ids == again.say(" more", lambda piece: None).ids


def test_a_line_that_does_not_fit_changes_nothing(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    chat.say("a", lambda piece: None)
    before = list(chat.history)
    model = chat.opened.model
    monkeypatch.setattr(model, "cfg", replace(model.cfg, max_position_embeddings=20))
    with pytest.raises(ValueError, match="leave no room"):
        chat.say("b" * 30, lambda piece: None)
    assert chat.history == before


def test_memory_stays_the_same_over_turns(chat: Chat) -> None:
    sizes = []
    for _ in range(3):
        chat.say("more", lambda piece: None)
        kda = [layer for layer in chat.state.layers if hasattr(layer, "recurrent")]
        sizes.append(sum(t.untyped_storage().nbytes() for layer in kda for t in (layer.conv, layer.recurrent)))
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_commands(chat: Chat, tmp_path: Path) -> None:
    assert "/reset" in command(chat, "/help")
    chat.say("<|end_of_msg|>", lambda piece: None)
    assert chat.history[:14] == list(b"<|end_of_msg|>")
    assert "saved" in command(chat, f"/save {tmp_path / 'talk.txt'}")
    assert (tmp_path / "talk.txt").read_text("utf-8") == chat.text
    assert command(chat, "/reset") and chat.history == [] and chat.state.tokens == 0
    command(chat, "/temperature 0.5")
    command(chat, "/max-tokens 3")
    command(chat, "/seed 7")
    assert (chat.params.temperature, chat.params.max_tokens, chat.params.seed) == (0.5, 3, 7)
    assert chat.generator.initial_seed() == 7
    for wrong in ("/temperature -1", "/temperature", "/seed x", "/max-tokens 0"):
        assert wrong.split()[0] in command(chat, wrong)
    assert (chat.params.temperature, chat.params.max_tokens, chat.params.seed) == (0.5, 3, 7)
    assert "vision" in command(chat, "/image a.png")
    assert "unknown command /foo" in command(chat, "/foo")
    assert "name of a file" in command(chat, "/save")
    assert "cannot be written" in command(chat, "/save /dev/null/x")


def test_chat_over_a_pipe(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once\n/temperature 0\n//slash\n/quit\nnever read\n"))
    said: list[str] = []
    monkeypatch.setattr(Chat, "say", _spy(Chat.say, said))
    chat_stage.main(ChatArgs(model=run, max_tokens=3, seed=1))
    out, err = capsys.readouterr()
    assert out.startswith(BASE + "\n") and "(temperature is 0)" in out and "> " not in out
    assert said == ["Once", "/slash"] and err.count("seed 1") == 2


def test_ctrl_c_leaves_a_pipe_after_what_was_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once\nagain\n"))
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        chat_stage.main(ChatArgs(model=run, max_tokens=3, seed=1))
    assert "answer: 2 tokens" in capsys.readouterr().err


def test_ctrl_c_at_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """During an answer it leads back to the prompt, at the prompt it ends the program."""

    lines = iter(["Once", "again"])

    def typed(prompt: str) -> str:
        for line in lines:
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    interrupt_after(monkeypatch, 2)
    chat_stage.main(ChatArgs(model=run, max_tokens=3, seed=1))
    out, err = capsys.readouterr()
    assert "/help" in out and err.count("interrupted") == 2


def test_a_tuned_model_is_not_called_a_base_model(chat: Chat) -> None:
    assert chat_stage.banner(chat.opened) == BASE
    assert "base model" not in chat_stage.banner(replace(chat.opened, stage="sft"))


def _spy(say: Any, said: list[str]) -> Any:
    def spied(self: Chat, line: str, show: Any) -> Any:
        said.append(line)
        return say(self, line, show)

    return spied
