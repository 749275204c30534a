"""Numbers of a running server for Prometheus, under the names the field uses.

Gauges and counters are read off the engine when somebody asks; times are put into histograms as answers end. Nothing
is kept a second time, and a registry of its own leaves other users of the library in the process alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanok3.serve.engine import Engine, Outcome
from nanok3.serve.offload import Offload
from nanok3.serve.page_pool import Kind
from nanok3.serve.picture_sources import PictureSources
from nanok3.serve.step_seconds import StepSeconds

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
"""For what should take no time at all."""


class Metrics:
    """Watches one engine."""

    def __init__(self, engine: Engine, media: PictureSources | None = None) -> None:
        """media: whose pictures, videos and files are counted as well."""
        import prometheus_client

        self.engine = engine
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(_Readings(engine, media))  # type: ignore[arg-type]  # all it needs is `collect`

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Any:
            return prometheus_client.Histogram(f"nanok3_{name}", text, buckets=buckets, registry=self.registry)

        self._first = histogram("time_to_first_token_seconds", "From submission to the first token.")
        self._gap = histogram("inter_token_latency_seconds", "Between two tokens of one answer.")
        self._queue = histogram("request_queue_time_seconds", "From submission to admission.")
        self._whole = histogram("e2e_request_latency_seconds", "From submission to the end.")
        self._deciding = histogram("scheduler_seconds", "Of a step, to decide what is read.", SHORT)
        self._deciding_cpu = histogram("scheduler_cpu_seconds", "Of it, computing.", SHORT)
        moving = "Of a step, for prefixes that left for the tier or returned, computing."
        self._moving_cpu = histogram("offload_step_cpu_seconds", moving, SHORT) if engine.offload is not None else None
        self._reading = histogram("step_model_seconds", "Of a step, for the model.")
        self._answering = histogram("step_answer_seconds", "Of a step, for sampling and parsing.", SHORT)
        limits = "Prompts by what kept their prefix hit from being longer."
        self._limits = prometheus_client.Counter("nanok3_cache_limit", limits, ["limit"], registry=self.registry)
        engine.on_step = self.stepped
        if engine.offload is not None:
            engine.offload.on_restore = histogram("offload_restore_seconds", "To bring an evicted prefix back.").observe

    def gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def stepped(self, step: StepSeconds) -> None:
        """From the engine's thread."""
        self._deciding.observe(step.deciding)
        self._deciding_cpu.observe(step.deciding_cpu)
        if self._moving_cpu is not None:
            self._moving_cpu.observe(step.moving_cpu)
        self._reading.observe(step.reading)
        self._answering.observe(step.answering)

    def finished(self, outcome: Outcome) -> None:
        """An answer has ended. From the server's thread: the engine's has better to do."""
        self._queue.observe(outcome.queue_seconds)
        self._whole.observe(outcome.seconds)
        if outcome.first_token_seconds is not None:
            self._first.observe(outcome.first_token_seconds)
        if outcome.cache_limit is not None:
            self._limits.labels(outcome.cache_limit.split()[0]).inc()

    def text(self) -> bytes:
        """In the text format."""
        import prometheus_client

        return prometheus_client.generate_latest(self.registry)


def pages(engine: Engine) -> dict[str, dict[str, int]]:
    """By kind: pages that running requests hold ('used') and those that only the cache does ('cached'); and those that
    are free. Read from another thread than the engine's, so a step may lie between two of the numbers."""
    running = list(engine.scheduler.running)
    latent = len({page for sequence in running for page in list(sequence.pages)})
    state = sum(len(sequence.state) for sequence in running)
    found = {}
    for kind, used in ((Kind.LATENT, latent), (Kind.SNAPSHOT, state)):
        found[kind.value] = {"used": used, "cached": max(0, engine.pool.used(kind) - used)}
    return {**found, "any": {"free": engine.pool.free}}


class _Readings:
    """What Prometheus asks for its samples."""

    def __init__(self, engine: Engine, media: PictureSources | None) -> None:
        self.engine, self.media = engine, media

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, text, value in self._gauges():
            yield GaugeMetricFamily(f"nanok3_{name}", text, value=value)
        for name, text, value in self._counters():
            yield CounterMetricFamily(f"nanok3_{name}", text, value=value)
        places = GaugeMetricFamily("nanok3_pages", "Pages of the pool by kind and state.", labels=["kind", "state"])
        for kind, states in pages(self.engine).items():
            for state, count in states.items():
                places.add_metric([kind, state], count)
        yield places
        finished = CounterMetricFamily("nanok3_requests_finished", "Answers by how they ended.", labels=["reason"])
        for reason, count in list(self.engine.counters.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        if self.engine.offload is not None:
            yield from self._offload(self.engine.offload)
        if self.media is not None:
            yield from self._seen(self.media)

    def _seen(self, media: PictureSources) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        opened = CounterMetricFamily("nanok3_media_opened", "Pictures and videos of requests.", labels=["kind"])
        opened.add_metric(["picture"], media.counts.pictures)
        opened.add_metric(["video"], media.counts.videos)
        yield opened
        refused = "Requests refused for a picture or video in them."
        yield CounterMetricFamily("nanok3_media_refused", refused, value=media.counts.refused)
        held = "Of decoded pictures that waiting and running requests hold."
        yield GaugeMetricFamily("nanok3_media_bytes", held, value=self.engine.pixels.bytes)
        yield GaugeMetricFamily("nanok3_files", "Uploaded files that are kept.", value=len(media.files))
        yield GaugeMetricFamily("nanok3_file_bytes", "Their bytes.", value=media.files.bytes)
        yield CounterMetricFamily("nanok3_files_uploaded", "Files that came.", value=media.files.added)

    @staticmethod
    def _offload(offload: Offload) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        store = offload.store
        text = "What happened to units of evicted prefixes."
        units = CounterMetricFamily("nanok3_offload_units", text, labels=["event"])
        for event, count in vars(store.counts).items():
            units.add_metric([event], count)
        yield units
        for name, text, by_tier in (
            ("offload_units_kept", "Units outside of the pool.", store.units_kept),
            ("offload_bytes", "Their bytes.", store.bytes_kept),
        ):
            gauge = GaugeMetricFamily(f"nanok3_{name}", text, labels=["tier"])
            for tier, value in by_tier.items():
                gauge.add_metric([tier], value)
            yield gauge
        yield CounterMetricFamily("nanok3_offload_hits", "Prefixes that came back.", value=offload.restored)
        tokens = offload.restored_tokens
        yield CounterMetricFamily("nanok3_offload_hit_tokens", "Tokens whose latents came back.", value=tokens)

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        engine = self.engine
        yield "num_requests_running", "Answers that are being computed.", engine.running
        yield "num_requests_waiting", "Answers in the queue.", engine.waiting
        yield "cache_spans", "Spans of tokens in the prefix cache.", engine.cache.spans
        yield "cache_snapshots", "States in the prefix cache.", engine.cache.snapshots
        yield "cache_check_worst_difference", "Largest difference of a warm logit from a cold one.", engine.checks.worst

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        engine, counters = self.engine, self.engine.counters
        yield "prompt_tokens", "Tokens of prompts.", counters.prompt_tokens
        yield "cached_tokens", "Of them, taken from the prefix cache.", counters.cached_tokens
        yield "generation_tokens", "Tokens said.", counters.said_tokens
        yield "preemptions", "Times a running answer lost its pages.", engine.scheduler.preemptions
        yield "steps", "Steps of the engine.", counters.steps
        if engine.speculation is not None:
            drafted = engine.speculation.drafted
            yield "draft_tokens", "Tokens that were guessed.", drafted.tokens
            yield "draft_tokens_accepted", "Of them, those that were right.", drafted.accepted
        yield "cache_checks", "Prompts read again without the cache.", engine.checks.done
        yield "cache_checks_failed", "Of them, with another result.", engine.checks.failed
