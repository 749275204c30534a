"""Rollouts: N prompts with K samples each, played through the engine that serves, and paused instead of waited for.

    collect    begin turns -> engine steps -> turns that ended go to their environments -> next turns ...
               until lambda N K samples have ended and a group is whole; what still runs is paused
    train      on the groups that are whole
    collect    what was paused goes on first, then new prompts fill up to N

A trajectory may so span several iterations and policies: every token carries the log-probability that its own policy
gave it, and that policy's number. After an update the engine forgets all caches, and a paused sample is read again with
the new weights; its old tokens keep their old log-probabilities. Tokens older than `max_versions` updates are withheld
from training, but the reward stays in the mean of the group: dropping slow samples would train on quick ones only.

A sample whose environment failed has no reward, and is no part of its group's mean; a group in which fewer than two
samples have a verdict is void.

`state_dict` is everything that is begun: the next prompt's number, groups with their finished samples, paused samples
with ids, log-probabilities, versions and environments. So a run that was killed trains on the same samples as one that
was not. Random numbers are a function of run, prompt, sample and place.

Source: report 4.1.2, 5.3. What happens to caches and to stale tokens is not said there, and is ours.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from typing import Any

from nanok3.data.chat import OURS, Sentences, encode
from nanok3.data.tokenizer import Tokenizer
from nanok3.envs.environment import Reply
from nanok3.envs.episode import Episode
from nanok3.posttrain.rl_settings import RolloutSettings
from nanok3.posttrain.sample import Group, Problem, Sample
from nanok3.posttrain.speaker import Speaker
from nanok3.posttrain.throttle import Throttle
from nanok3.posttrain.turn import Turn, following
from nanok3.serve.sampler import SamplingParams


class Rollouts:
    """Everything that is begun. `source` gives the problem of a number, None where there are no more; `limit` the
    budget of a problem that is begun now."""

    def __init__(
        self,
        speaker: Speaker,
        tokenizer: Tokenizer,
        source: Callable[[int], Problem | None],
        settings: RolloutSettings,
        limit: Callable[[Problem], int | None] = lambda problem: None,
        sentences: Sentences = OURS,
    ) -> None:
        self.speaker, self.tokenizer, self.source, self.settings = speaker, tokenizer, source, settings
        self.limit, self.sentences = limit, sentences
        self.throttle = Throttle(settings.in_flight)
        self.groups: list[Group] = []
        self.cursor = self.version = self.iteration = 0
        self._problems: dict[int, Problem] = {}
        self._episodes: dict[tuple[int, int], Episode] = {}
        self._turns: list[Turn] = []
        self._ready: deque[Sample] = deque()
        self._acting: dict[Future[None], tuple[Turn, Reply]] = {}
        self._pool: Executor | None = ThreadPoolExecutor(settings.env_workers) if settings.env_workers else None

    # ---------------------------------------------------------------- one iteration

    def collect(self) -> list[Group]:
        """Play until enough samples have ended, and give out the groups that are whole, oldest prompt first."""
        self._fill()
        wanted = math.ceil(self.settings.pause * self.settings.prompts * self.settings.samples)
        before = self._ended()
        while self._busy and not (self._ended() - before >= wanted and any(g.complete for g in self.groups)):
            self._begin_turns()
            self._step()
        self._pause()
        whole = [group for group in self.groups if group.complete]
        self.groups = [group for group in self.groups if not group.complete]
        self.iteration += 1
        return whole

    def renew(self) -> None:
        """The weights have changed."""
        self.version += 1
        self.speaker.renew(self.version)

    def release(self, groups: list[Group]) -> None:
        """These were trained on; their environments are closed."""
        for group in groups:
            self._problems.pop(group.prompt, None)
            for sample in group.samples:
                episode = self._episodes.pop((sample.prompt, sample.number), None)
                if episode is not None:
                    episode.close()

    def problem(self, group: Group) -> Problem:
        """What a group was asked."""
        return self._problem(group.prompt)

    def close(self) -> None:
        for episode in self._episodes.values():
            episode.close()
        self._episodes.clear()
        if self._pool is not None:
            self._pool.shutdown()

    def _ended(self) -> int:
        return sum(sample.outcome != "running" for group in self.groups for sample in group.samples)

    @property
    def _busy(self) -> bool:
        return bool(self._ready or self._turns or self._acting)

    def _fill(self) -> None:
        """What was paused first, then new prompts up to N."""
        running = [s for group in self.groups for s in group.samples if s.outcome == "running"]
        self._ready = deque(running)
        while len(self.groups) < self.settings.prompts:
            problem = self.source(self.cursor)
            if problem is None:
                break
            self._problems[self.cursor] = problem
            made = [Sample(self.cursor, k, began=self.iteration) for k in range(self.settings.samples)]
            self.groups.append(Group(self.cursor, made, self.limit(problem)))
            self._ready.extend(made)
            self.cursor += 1

    def _problem(self, number: int) -> Problem:
        if number not in self._problems:
            problem = self.source(number)
            assert problem is not None, number
            self._problems[number] = problem
        return self._problems[number]

    # ---------------------------------------------------------------- turns

    def _begin_turns(self) -> None:
        most = self.throttle.look(*self.speaker.load())
        while self._ready and len(self._turns) < most:
            self._begin(self._ready.popleft())

    def _begin(self, sample: Sample) -> None:
        """Go on with a sample at the turn it stands in."""
        problem, group = self._problem(sample.prompt), self._group(sample)
        if self._episode(sample, problem) is None:
            return
        if not sample.ids:
            sample.ids = encode(problem.domain.prompt(problem.task, problem.effort), self.tokenizer)
            sample.begins = len(sample.ids)
        turn = Turn(sample, self.tokenizer, problem.domain.counted, group.limit, self.version)
        left = self.settings.max_tokens - (len(sample.ids) - sample.begins)
        if min(left, self.speaker.context - len(sample.ids)) < 1:
            self._finish(turn, "length", 0.0)
            return
        seed = sample.seed(self.settings.seed)
        self.speaker.begin(turn, SamplingParams(self.settings.temperature, seed=seed, max_tokens=left))
        self._turns.append(turn)

    def _group(self, sample: Sample) -> Group:
        return next(group for group in self.groups if group.prompt == sample.prompt)

    def _episode(self, sample: Sample, problem: Problem) -> Episode | None:
        """The sample's environment, made anew where there is none yet; None if that failed."""
        key = sample.prompt, sample.number
        if key not in self._episodes:
            episode = Episode(problem.domain.open(problem.task), problem.task)
            episode.reset()
            if episode.running and sample.snapshot:
                episode.environment.restore(base64.b64decode(sample.snapshot))
            self._episodes[key] = episode
        elif sample.snapshot:
            self._episodes[key].environment.resume()
        sample.snapshot = ""
        episode = self._episodes[key]
        if not episode.running:
            self._void(sample, episode)
        return episode if episode.running else None

    def _step(self) -> None:
        """A step of the engine, and what its turns' ends bring."""
        if self._turns:
            self.speaker.step()
            ended = [turn for turn in self._turns if turn.outcome is not None]
            self._turns = [turn for turn in self._turns if turn.outcome is None]
            for turn in ended:
                self._end(turn)
        elif self._acting:
            wait(self._acting, return_when=FIRST_COMPLETED)
        for future in [future for future in self._acting if future.done()]:
            turn, reply = self._acting.pop(future)
            future.result()
            self._acted(turn, reply)

    def _end(self, turn: Turn) -> None:
        outcome, sample = turn.outcome, turn.sample
        assert outcome is not None
        self.speaker.rest(sample)
        if outcome.finish_reason == "error":
            raise RuntimeError(f"prompt {sample.prompt}, sample {sample.number}: {outcome.error}")
        if turn.over:
            self._finish(turn, "budget", 0.0)
        elif outcome.finish_reason == "length":
            self._finish(turn, "length", 0.0)
        else:
            self._act(turn, turn.reply())

    def _act(self, turn: Turn, reply: Reply) -> None:
        episode = self._episodes[turn.sample.prompt, turn.sample.number]
        if self._pool is not None:
            self._acting[self._pool.submit(episode.step, reply)] = turn, reply
            return
        episode.step(reply)
        self._acted(turn, reply)

    def _acted(self, turn: Turn, reply: Reply) -> None:
        """The environment has answered."""
        sample = turn.sample
        episode = self._episodes[sample.prompt, sample.number]
        played = episode.trajectory
        if played.outcome == "infra-failed":
            self._void(sample, episode)
        elif played.outcome == "done":
            self._finish(turn, "stop", played.reward)
        elif sample.ids[-1] != self.tokenizer.end_of_msg_id:  # nothing can follow a message that did not end
            self._finish(turn, "broken", 0.0)
        else:
            seen = played.observations[-1]
            sample.tool_errors += sum(result.error for result in seen.results)
            self._turn_over(turn)
            sample.ids += following(reply, seen, self.tokenizer, self.sentences)
            sample.begins = len(sample.ids)
            self._ready.append(sample)

    def _turn_over(self, turn: Turn) -> None:
        turn.sample.thinking += turn.parser.reasoning_ids
        turn.sample.turns += 1

    def _finish(self, turn: Turn, why: str, reward: float | None) -> None:
        self._turn_over(turn)
        sample = turn.sample
        sample.outcome, sample.finish, sample.reward, sample.ended = "done", why, reward, self.iteration
        self.speaker.forget([sample])

    def _void(self, sample: Sample, episode: Episode) -> None:
        sample.outcome, sample.reason, sample.ended = "infra-failed", episode.trajectory.reason, self.iteration
        self.speaker.forget([sample])

    # ---------------------------------------------------------------- pauses and crashes

    def _pause(self) -> None:
        """Whatever acts is waited for, its deadline is its own; whatever is said stops where it is."""
        turns, self._turns = self._turns, []
        self.speaker.pause()
        self._turns = [turn for turn in turns if turn.outcome is not None and turn.outcome.finish_reason != "cancelled"]
        for turn in self._turns:
            self._end(turn)
        self._turns = []
        while self._acting:
            self._step()
        self._ready.clear()
        for group in self.groups:
            for sample in group.samples:
                if sample.outcome == "running":
                    self._set_aside(sample)

    def _set_aside(self, sample: Sample) -> None:
        self.speaker.rest(sample)
        episode = self._episodes.get((sample.prompt, sample.number))
        if episode is not None and sample.turns:
            sample.snapshot = base64.b64encode(episode.environment.snapshot()).decode()
            episode.environment.pause()

    def state_dict(self) -> dict[str, Any]:
        """Between two iterations."""
        counts = {"cursor": self.cursor, "version": self.version, "iteration": self.iteration}
        return {**counts, "most": self.throttle.most, "groups": [group.to_json() for group in self.groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor, self.version, self.iteration = state["cursor"], state["version"], state["iteration"]
        self.throttle.most = min(self.throttle.top, state["most"])
        self.groups = [Group.from_json(group) for group in state["groups"]]
        self.speaker.renew(self.version)
