"""`nanok3 chat`: talk to a model in the terminal, or through a pipe, a line a turn.

    nanok3 chat runs/x
    printf 'Once upon a time\n' | nanok3 chat runs/x --max-tokens 100

One state lives through the whole conversation, so a turn reads only what is new, and the KDA layers keep the same
number of bytes after a thousand turns. A base model has no turns: what you type is joined to the text so far, by a
newline unless it begins with a blank, and the model continues; an empty line lets it go on.

The ids are the record of the conversation: `history`, of which the state has read the first `state.tokens`. What an
interrupted or finished answer left unread is read with the next turn; nothing is encoded twice. A picture stands in
them as one placeholder a row, before the line that it goes with.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanok3.stages.generate import ModelFlags, SamplingFlags, printer, summary

if TYPE_CHECKING:
    from nanok3.data.images import Image
    from nanok3.serve.generate import Completion
    from nanok3.serve.pictures import Shown
    from nanok3.serve.run_folder import OpenModel
    from nanok3.serve.sampler import SamplingParams

BASE = "This is a base model: it continues text; it has not been taught to answer."
TUNED = "This model was trained as {stage!r}, but this command writes no chat markup: it continues text."
HELP = """\
/reset            forget the conversation
/temperature X    0 always takes the likeliest token
/seed N           start the random numbers anew
/max-tokens N     length of an answer
/save FILE        write the text so far to a file
/image FILE       a picture for your next line, if the model sees
/ask QUESTION     ask in the form of the picture documents: Question: ... Answer: ...
/help, /quit
Text is joined by a newline, or directly if it begins with a blank; an empty line lets the model go on. A line that
begins with / is written with a second one. Ctrl-C ends an answer and keeps what was said; at the prompt it quits."""


@dataclass(frozen=True, kw_only=True)
class ChatArgs(SamplingFlags, ModelFlags):
    """Talk to a model in the terminal. A base model continues your text; it has not been taught to answer."""


class Chat:
    """A conversation: the model's state, the ids it consists of, and the sampling that commands can change."""

    def __init__(self, opened: OpenModel, params: SamplingParams) -> None:
        self.opened, self.params = opened, params
        self.reset()

    def reset(self) -> None:
        """Forget everything; the random numbers begin anew too."""
        from nanok3.serve.sampler import new_generator

        self.state = self.opened.model.new_state(1)
        self.history: list[int] = []
        self.attached: list[Image] = []
        """Pictures that go with the next line."""
        self.pictures: list[Shown] = []
        """Those in the history that may not have been read to their ends."""
        self.generator = new_generator(self.params.seed)

    @property
    def text(self) -> str:
        """What was said; of a picture one placeholder."""
        pad = self.opened.model.cfg.media_placeholder_token_id if self.opened.model.cfg.has_vision else None
        pairs = zip([None, *self.history], self.history)
        return self.opened.tokenizer.decode([token for before, token in pairs if token != pad or before != pad])

    def ask(self, question: str, show: Callable[[str], None]) -> Completion:
        """Ask as the picture documents do, whose answers end with their lines. ValueError as of `say`."""
        from nanok3.data.pictures.document import question_text

        if not question:
            raise ValueError("/ask needs a question")
        params = replace(self.params, stop=(*self.params.stop, "\n"))
        return self.say(question_text(question).removeprefix("\n"), show, params)

    def say(self, line: str, show: Callable[[str], None], params: SamplingParams | None = None) -> Completion:
        """Add the user's line and let the model continue. ValueError if there is nothing to read or no room left."""
        from nanok3.serve.generate import generate, room

        model, tokenizer, read = self.opened.model, self.opened.tokenizer, self.state.tokens
        new, shown = self._encoded(line)
        ids = self.history[read:] + new
        if not ids and read:
            raise ValueError("the text ends here; type something, or /reset")
        ids = ids or [tokenizer.eos_id]  # nothing at all: a document begins
        room(model, self.state, ids)  # a line that does not fit changes nothing
        self.history[read:] = ids
        self.attached = []
        self.pictures = [picture for picture in self.pictures if picture.end > read] + list(shown)
        params = params or self.params
        completion = generate(
            model, tokenizer, ids, params, self.state, show, generator=self.generator, images=self.pictures
        )
        ended = completion.ids[-1:] in ([tokenizer.eos_id], [tokenizer.end_of_msg_id])
        self.history += completion.ids[:-1] if ended else completion.ids  # without its end, the text can go on
        return completion

    def _encoded(self, line: str) -> tuple[list[int], tuple[Shown, ...]]:
        from nanok3.serve.pictures import show

        model, tokenizer = self.opened.model, self.opened.tokenizer
        if not self.attached:
            return tokenizer.encode(self._joined(line)), ()
        ids = tokenizer.encode("\n" if self._begun else "")
        for image in self.attached:
            ids += tokenizer.encode(image.prompt, allow_special=True)
        assert model.cfg.media_placeholder_token_id is not None
        return show(
            ids + tokenizer.encode(f"\n{line}"), self.attached, model.cfg.media_placeholder_token_id, len(self.history)
        )

    @property
    def _begun(self) -> bool:
        return bool(self.history) and not self.text.endswith("\n")

    def _joined(self, line: str) -> str:
        return "\n" + line if line and self._begun and not line[0].isspace() else line


def main(args: ChatArgs) -> None:
    """Read lines until the end of input, /quit or Ctrl-C at the prompt."""
    params = args.sampling()
    chat = Chat(args.open(), params)
    terminal = sys.stdin.isatty()
    print(banner(chat.opened), flush=True)
    if terminal:
        with contextlib.suppress(ImportError):  # line editing, where the system has it
            import readline  # noqa: F401
        print("/help lists the commands.")
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    show = printer()
    while (line := read_line(terminal)) is not None and line.strip() not in ("/quit", "/exit"):
        if line.startswith("/") and not line.startswith("//") and not is_question(line):
            print(command(chat, line), flush=True)
        else:
            take_turn(chat, line, show, terminal)


def is_question(line: str) -> bool:
    """Whether a line is `/ask` and what is asked."""
    return line.split(" ", 1)[0].rstrip() == "/ask"


def banner(opened: OpenModel) -> str:
    """What kind of model is about to speak."""
    return TUNED.format(stage=opened.stage) if opened.answers else BASE


def read_line(terminal: bool) -> str | None:
    """The next line without its newline; None at the end."""
    if not terminal:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def take_turn(chat: Chat, line: str, show: Callable[[str], None], terminal: bool) -> None:
    """One answer, its speed, and what to do about Ctrl-C: back to the prompt, or out of the pipe."""
    try:
        completion = chat.ask(line[5:].strip(), show) if is_question(line) else chat.say(line.removeprefix("/"), show)
    except ValueError as error:
        print(f"({error})", flush=True)
        return
    print(flush=True)
    print(summary([completion], chat.params), file=sys.stderr)
    if completion.finish_reason == "interrupted" and not terminal:
        raise KeyboardInterrupt


def command(chat: Chat, line: str) -> str:
    """Carry out a line that begins with a slash; what to tell the user."""
    name, _, value = line.partition(" ")
    value = value.strip()
    try:
        match name:
            case "/help":
                return HELP
            case "/reset":
                chat.reset()
                return "(forgotten)"
            case "/temperature":
                chat.params = replace(chat.params, temperature=float(value))
            case "/max-tokens":
                chat.params = replace(chat.params, max_tokens=int(value))
            case "/seed":
                chat.params = replace(chat.params, seed=int(value))
                chat.generator.manual_seed(int(value))
            case "/save":
                return save(chat, value)
            case "/image":
                return image(chat, value)
            case _:
                return f"(unknown command {name}; /help lists them, // begins a text with a slash)"
    except ValueError as error:
        return f"({name}: {error})"
    return f"({name.removeprefix('/')} is {value})"


def save(chat: Chat, name: str) -> str:
    """Write the text so far."""
    from nanok3.data.files import write_file

    if not name:
        return "(/save needs the name of a file)"
    try:
        write_file(Path(name).expanduser(), chat.text.encode())
    except OSError as error:
        return f"(/save: {name} cannot be written: {error.strerror})"
    return f"(saved {len(chat.history)} tokens to {name})"


def image(chat: Chat, name: str) -> str:
    """Take a picture for the next line; quotes around its path are left out. ValueError for a file that is none."""
    from nanok3.data.images import preprocess_image

    if not chat.opened.model.cfg.has_vision:
        return "(this model has no vision tower; pictures need a model that has one)"
    if not name:
        return "(/image needs the name of a file)"
    if len(name) > 1 and name[0] == name[-1] and name[0] in "'\"":
        name = name[1:-1]
    try:
        found = preprocess_image(os.path.expanduser(name))  # a Path would make another address of an address
    except ImportError as error:
        return f"(/image: {error})"
    chat.attached.append(found)
    return f"(a picture of {found.size[0]} x {found.size[1]}, {found.tokens} tokens, goes with your next line)"
