"""`nanok3 serve`: a model behind an HTTP API that OpenAI's clients use unchanged.

    nanok3 serve runs/x --port 8000                                 http://127.0.0.1:8000/v1
    nanok3 serve --scripted replies.jsonl --tokenizer runs/x/model  a stub that says what a file tells it to

It listens on this machine only, unless --host says otherwise; then give it --api-key. SIGTERM and Ctrl-C end it in
order: no more requests are taken, those there are finish, or are ended after --drain-timeout seconds; a second Ctrl-C
does not wait. The log on stderr has a line of JSON for every request, without what was asked or answered.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import socket
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from nanok3.stages.generate import ModelFlags

if TYPE_CHECKING:
    from nanok3.data.chat import Sentences
    from nanok3.data.tokenizer import Tokenizer
    from nanok3.serve.engine import Engine, Reading
    from nanok3.serve.engine import Settings as EngineSettings
    from nanok3.serve.http_gate import GateSettings
    from nanok3.serve.offload import Tier
    from nanok3.serve.picture_sources import PictureSettings
    from nanok3.serve.server import ServerSettings
    from nanok3.serve.speculative import Speculation

GIB = 1 << 30
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions and what belongs to them."""

    model: Annotated[Path | None, tyro.conf.Positional] = None
    """A run folder, one of its checkpoints, or any model folder in the official layout."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's."""
    port: int = 8000
    """0 takes a free one, which is printed."""
    served_model_name: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Name of the model for clients; may be given several times. Not given: the folder's."""

    dtype: Literal["auto", "float32", "bfloat16", "stored"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU; stored: as on disk, packed experts stay packed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    expert_inputs: Literal["plain", "mxfp8"] = "plain"
    """mxfp8: routed experts read their inputs rounded to MXFP8, as `--train.qat w4a8` trains them."""
    experts: Literal["resident", "stream"] = "resident"
    """stream: routed experts stay on disk and are read when they are chosen; for models larger than memory, on a
    CPU."""
    expert_memory: str | None = None
    """With --experts stream: memory for those used last, such as 512MiB. Not given: half of what is free."""
    scripted: Path | None = None
    """In place of a model: a file of replies, one JSON object a line. Needs --tokenizer."""
    tokenizer: Path | None = None
    """Folder of another tokenizer than the model's."""
    prompt_profile: Path | None = None
    """JSON file with the wording of prompts for tools and options. Not given: the model folder's, or our own."""

    memory: float | None = None
    """GiB for states and latents of running requests and the prefix cache. Not given: a quarter of what is free."""
    page_tokens: int | None = None
    """Tokens in a page; not given: the fewest that hold the state of a KDA layer."""
    hash_block: int = 512
    """Tokens between two places at which a prefix can be taken from the cache."""
    prefix_cache: bool = True
    """Whether prompts are looked up in the prefix cache."""
    cache_memory: str | None = None
    """Memory for prefixes that were evicted from there, such as 4GiB. Not given: none."""
    cache_folder: Path | None = None
    """Folder for those that have no room in memory, found again by the next server of this model."""
    cache_disk: str | None = None
    """How much the folder may hold; 16GiB when not given."""
    check_cache: float = 0.0
    """Share of the requests with a cache hit that are read again without it and compared."""
    max_num_seqs: int = 64
    """Requests that are computed together."""
    max_num_batched_tokens: int = 512
    """Tokens that one step reads at most."""
    max_model_len: int | None = None
    """Tokens of prompt and answer; not given: what the model was built for."""
    max_waiting: int = 1024
    """Requests that may wait before more are refused with status 429."""
    draft: str | None = None
    """Guess several tokens and read them at once; answers stay what they are. `ngram` guesses what followed the same
    tokens before; a folder is a draft made by `nanok3 draft`."""
    draft_tokens: int = 7
    """Guesses for one request at a time."""

    api_key: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Key that clients have to send; may be given several times."""
    api_key_file: Path | None = None
    """More keys, one a line."""
    admin_key: str | None = None
    """Key for /admin; without one it is closed."""
    allow_reload: bool = False
    """Let who has the admin key put other weights into the model (/admin/reload), as `nanok3 rl --workers` does."""
    max_requests_per_key: int | None = None
    """Requests of one key at a time."""
    max_body_mib: int = 32
    """Largest body of a request."""
    max_pictures: int = 10
    """Pictures of a request."""
    max_videos: int = 2
    """Videos of a request."""
    max_video_frames: int = 512
    """Frames of a video, at eight a second or what it has."""
    max_picture_patches: int = 262_144
    """Patches of 14 x 14 pixels of all pictures and frames of a request."""
    allow_image_urls: bool = False
    """Fetch pictures and videos that requests name by http(s) address; never from this machine or its network."""
    max_files: int = 100
    """Uploaded files that are kept of one client."""
    max_files_mib: int = 256
    """And of all clients together; they are kept in memory."""
    allowed_origins: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Origin of web pages that may ask from a browser; none without it."""

    request_timeout: float | None = None
    """Seconds a request may take; requests can ask for less."""
    keep_alive: float = 5.0
    """Seconds without a token after which a stream gets a comment."""
    drain_timeout: float = 30.0
    """Seconds that running requests have when the server is told to end."""
    strict_sampling: bool = False
    """Refuse the sampling values that Kimi's own service refuses."""
    thinking: bool = True
    """Whether to think where a request says nothing."""
    effort: Literal["low", "high", "max"] = "max"
    """How hard, where a request says nothing."""
    log_prompts: bool = False
    """Write prompts into the log."""

    def engine_settings(self) -> EngineSettings:
        from nanok3.serve.engine import Settings
        from nanok3.serve.scheduler import Limits

        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_body_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 2")
        limits = Limits(self.max_num_batched_tokens, self.max_num_seqs)
        return Settings(
            self.hash_block, self.prefix_cache, self.max_model_len, self.max_waiting, self.check_cache, limits=limits
        )

    def server_settings(self, sentences: Sentences) -> ServerSettings:
        from nanok3.serve.protocol import Policy
        from nanok3.serve.sampling_fields import Rules
        from nanok3.serve.server import ServerSettings

        rules = Rules.K3 if self.strict_sampling else Rules.FREE
        return ServerSettings(
            self.served_model_name or (self._folder_name(),),
            Policy(rules=rules, thinking=self.thinking, effort=self.effort),
            sentences,
            self.request_timeout,
            self.keep_alive,
            self.allowed_origins,
            self._gate(),
            None if self.cache_folder is None else self.cache_folder / "conversations",
            self._pictures(),
            self._reload(),
        )

    def _reload(self) -> bool:
        if self.allow_reload and (self.admin_key is None or self.experts == "stream" or self.scripted is not None):
            raise ValueError("allow_reload needs --admin-key and a model in memory; no --scripted, no --experts stream")
        return self.allow_reload

    def cache_bytes(self) -> tuple[int, int] | None:
        """For evicted prefixes in memory and on disk; None where they go nowhere."""
        from nanok3.ledger import parse_bytes

        if self.cache_disk is not None and self.cache_folder is None:
            raise ValueError(f"cache_disk is {self.cache_disk}; it needs --cache-folder")
        if self.cache_memory is None and self.cache_folder is None:
            return None
        if self.experts == "stream":
            raise ValueError(
                "cache_memory and cache_folder name a model by all of its weights; allowed: no --experts stream"
            )
        if self.scripted is not None or not self.prefix_cache:
            flag = "--scripted" if self.scripted else "--no-prefix-cache"
            raise ValueError(f"cache_memory and cache_folder need a model and its prefix cache; allowed: no {flag}")
        memory = 0 if self.cache_memory is None else parse_bytes("cache_memory", self.cache_memory)
        return memory, parse_bytes("cache_disk", self.cache_disk or "16GiB")

    def draft_folder(self) -> Path | None:
        """That of a trained draft. ValueError for flags that cannot be."""
        from nanok3.serve.draft_folder import read_facts
        from nanok3.serve.speculative import check_tokens

        check_tokens(self.draft_tokens)
        if self.draft is not None and self.scripted is not None:
            raise ValueError(f"draft is {self.draft!r}; a script needs none: leave it out with --scripted")
        if self.draft in (None, "ngram"):
            return None
        if not Path(self.draft).is_dir():
            raise ValueError(f"draft is {self.draft!r}; allowed: 'ngram', or a folder made by nanok3 draft")
        read_facts(Path(self.draft))
        return Path(self.draft)

    def speculation(self, reading: Reading) -> Speculation | None:
        """Where drafts come from."""
        from nanok3.serve.runner import Runner
        from nanok3.serve.speculative import Drafter, NGrams, Speculation

        if self.draft is None:
            return None
        trained = reading.drafter if isinstance(reading, Runner) else None
        drafter: Drafter = NGrams() if trained is None else trained
        return Speculation(drafter, self.draft_tokens)

    def tier(self, reading: Reading) -> Tier | None:
        """Where evicted prefixes of a model go."""
        from nanok3.serve.offload import Tier, fingerprint
        from nanok3.serve.runner import Runner

        sizes = self.cache_bytes()
        if sizes is None:
            return None
        assert isinstance(reading, Runner)
        memory, disk = sizes
        name = fingerprint(reading.model)
        if reading.drafter is not None:  # whose rows lie in the same pages
            name = hashlib.sha256((name + fingerprint(reading.drafter.draft)).encode()).hexdigest()
        return Tier(name, memory, self.cache_folder, disk)

    def _pictures(self) -> PictureSettings:
        from nanok3.serve.file_store import FilesLimits
        from nanok3.serve.picture_sources import PictureSettings

        limits = ("max_pictures", "max_videos", "max_video_frames", "max_picture_patches", "max_files", "max_files_mib")
        for name in limits:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        files = FilesLimits(self.max_files, self.max_files_mib << 20)
        return PictureSettings(
            self.max_pictures,
            self.max_videos,
            self.max_video_frames,
            self.max_picture_patches,
            self.allow_image_urls,
            self.max_body_mib << 20,
            files=files,
        )

    def _gate(self) -> GateSettings:
        from nanok3.serve.http_gate import GateSettings

        keys = (*self.api_key, *(_read_keys(self.api_key_file) if self.api_key_file else ()))
        return GateSettings(keys, self.admin_key, self.max_requests_per_key, self.max_body_mib << 20, self.log_prompts)

    def _folder_name(self) -> str:
        return "scripted" if self.model is None else self.model.resolve().name


def _read_keys(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"api_key_file: no file {path}")
    try:
        keys = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file: {path} is no UTF-8 ({error})") from None
    if not keys:
        raise ValueError(f"api_key_file: {path} has no key")
    return keys


def main(args: ServeArgs) -> None:
    """Serve until told to end."""
    if not 0 <= args.port < 65536:
        raise ValueError(f"port is {args.port}; allowed: 0 to 65535")
    if not 0 <= args.drain_timeout <= DAY:
        raise ValueError(f"drain_timeout is {args.drain_timeout}; it must lie between 0 and {DAY} seconds")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    listen(args.host, args.port).close()  # an address that cannot be had is told before a model is read
    app, engine, name = open_app(args)
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if not (args.api_key or args.api_key_file) and not host.startswith(("127.", "::1")):
        print("anybody who reaches this address can ask: --api-key closes it", file=sys.stderr)
    engine.start()
    print(f"{name} on http://{shown}:{port}/v1, context {engine.context}, {engine.pool.pages} pages", flush=True)
    serve(app, engine, listener, args.drain_timeout)


def open_app(args: ServeArgs) -> tuple[Any, Engine, str]:
    """The ASGI app over an engine that has not been started, and the model's name."""
    from nanok3.data.chat import OURS
    from nanok3.serve.api import make_app
    from nanok3.serve.engine import Engine
    from nanok3.serve.grammar import for_request

    settings, _ = args.engine_settings(), args.cache_bytes()  # mistakes are told before a model is read
    args.draft_folder(), args.server_settings(OURS)
    runner, tokenizer, forbidden, sentences = open_scripted(args) if args.scripted else open_real(args)
    settings = replace(settings, tier=args.tier(runner))
    ends = {tokenizer.eos_id, tokenizer.end_of_msg_id}
    engine = Engine(runner, ends, forbidden, settings, speculation=args.speculation(runner))
    server = args.server_settings(sentences)
    constrain = functools.partial(for_request, tokenizer=tokenizer, vocab_size=runner.vocab_size)
    return make_app(engine, tokenizer, server, constrain), engine, server.names[0]


Opened = tuple["Reading", "Tokenizer", list[int], "Sentences"]
"""Who reads, the tokenizer, ids that are never said, the wording of prompts."""


def open_real(args: ServeArgs) -> Opened:
    """A model of a folder."""
    from nanok3.data.tokenizer import Tokenizer
    from nanok3.serve.draft_folder import load_draft
    from nanok3.serve.generate import unnamed_ids
    from nanok3.serve.runner import Runner

    if args.model is None:
        raise ValueError("no model was given; name its folder, or --scripted FILE with --tokenizer FOLDER")
    opened = ModelFlags(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        expert_inputs=args.expert_inputs,
        experts=args.experts,
        expert_memory=args.expert_memory,
    ).open()
    if not opened.answers:
        print(f"{args.model} is a base model: it continues texts, and has not been taught to answer", file=sys.stderr)
    tokenizer = opened.tokenizer if args.tokenizer is None else Tokenizer.load(args.tokenizer)
    forbidden = unnamed_ids(tokenizer, opened.model.cfg.vocab_size)
    folder = args.draft_folder()
    draft = None if folder is None else load_draft(folder, opened.model)
    memory = memory_bytes(args.memory, opened.model.lm_head.weight.device)
    runner = Runner(opened.model, memory, args.page_tokens, draft=draft)
    forbidden += [] if runner.media_pad is None else [runner.media_pad]  # an answer has no pictures
    return runner, tokenizer, forbidden, sentences_of(args, opened.folder)


def open_scripted(args: ServeArgs) -> Opened:
    """A stub in its place."""
    from nanok3.data.tokenizer import Tokenizer
    from nanok3.serve.scripted import Scripted
    from nanok3.serve.scripted_runner import ScriptedRunner

    if args.model is not None or args.tokenizer is None:
        raise ValueError("scripted needs --tokenizer FOLDER, and no model beside it")
    assert args.scripted is not None
    tokenizer = Tokenizer.load(args.tokenizer)
    return ScriptedRunner(Scripted.load(args.scripted, tokenizer)), tokenizer, [], sentences_of(args, args.tokenizer)


def sentences_of(args: ServeArgs, folder: Path) -> Sentences:
    from nanok3.data.chat import Sentences

    return Sentences.of(folder) if args.prompt_profile is None else Sentences.load(args.prompt_profile)


def memory_bytes(gib: float | None, device: Any) -> int:
    """What --memory means on a device."""
    import torch

    if gib is not None:
        if not 0 < gib < 2**20:
            raise ValueError(f"memory is {gib}; allowed: a number of GiB above 0")
        return int(gib * GIB)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. ValueError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise ValueError(f"cannot listen on {host}:{port}: {why}") from None


def serve(app: Any, engine: Engine, listener: socket.socket, drain_seconds: float) -> None:
    """Run the app until a signal has ended it."""
    try:
        import uvicorn
    except ImportError:
        raise ImportError("the server needs uvicorn: pip install 'nanok3[serve]'") from None

    from nanok3.serve.connections import patient_protocol

    # Another thread lets this one go on after 5 ms, unless told otherwise: longer than all that a step decides.
    sys.setswitchinterval(0.0005)
    drains: list[threading.Thread] = []

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            self.force_exit = bool(drains)
            self.should_exit = True
            if not drains:  # whoever waits for an answer gets it, or is told, before connections close
                drains.append(threading.Thread(target=engine.drain, args=(drain_seconds,), daemon=True))
                drains[0].start()

    config = uvicorn.Config(
        app,
        http=patient_protocol(),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=int(drain_seconds) + 5,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    Server(config).run(sockets=[listener])
    engine.drain(0)
