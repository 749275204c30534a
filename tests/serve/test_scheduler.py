"""Scheduler, prefix cache and page pool together, over a memory that only writes down what was put into it.

A latent page is P rows, each the digest of all tokens up to its own; a state page is the digest of all tokens read.
Whatever is shared, copied, evicted or pre-empted, a sequence must find exactly the digests of its own tokens: then a
warm answer cannot differ from a cold one.
"""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.serve.page_pool import PageLayout, PagePool
from nanok3.serve.prefix_cache import PrefixCache, SpanKeys
from nanok3.serve.scheduler import WATCHFUL_STEPS, Limits, Scheduler
from nanok3.serve.sequence import Sequence, Status


class WrittenMemory:
    def __init__(self, pages, page_tokens):
        self.content = {page: ["never written"] * page_tokens for page in range(pages)}
        self.page_tokens = page_tokens

    def copy(self, source, target):
        self.content[target] = list(self.content[source])

    def clear(self, page):
        self.content[page] = [hash(())]

    def freed(self, page):
        self.content[page] = ["poison"] * self.page_tokens


class World:
    def __init__(self, pages, page_tokens, span, groups, caching=True, **limits):
        self.layout = PageLayout(page_tokens, 1, (1,) * groups)
        self.memory = WrittenMemory(pages, page_tokens)
        self.pool = PagePool(pages, self.memory.freed)
        self.cache = PrefixCache(self.pool, span, page_tokens, groups)
        self.scheduler = Scheduler(self.cache, self.layout, self.memory, Limits(**limits), caching)
        self.clock = 0

    def add(self, ids, priority=0):
        keys = SpanKeys(self.cache.span)
        keys.push(ids)
        self.clock += 1
        sequence = Sequence(str(self.clock), list(ids), len(ids), keys, priority, self.clock)
        self.scheduler.add(sequence)
        return sequence

    def step(self, say=lambda sequence: 7):
        work = self.scheduler.plan()
        assert sum(piece.count for piece in work) <= max(self.scheduler.limits.budget, len(work))
        for piece in work:
            self.read(piece)
            self.scheduler.commit(piece)
            if piece.last:
                piece.sequence.say(say(piece.sequence))
        self.check()
        return work

    def read(self, piece):
        sequence = piece.sequence
        assert piece.count > 0
        digests = self.digests(sequence.ids)
        for position in range(piece.start, piece.start + piece.count):
            page = sequence.pages[position // self.layout.page_tokens]
            self.memory.content[page][position % self.layout.page_tokens] = digests[position]
        for page in sequence.state:
            before = digests[piece.start - 1] if piece.start else hash(())
            assert self.memory.content[page] == [before], "the state is another's"
            self.memory.content[page] = [digests[piece.start + piece.count - 1]]

    @staticmethod
    def digests(ids):
        """After each token: a number that names it and all before it."""
        return list(itertools.accumulate(ids, lambda before, token: hash((before, token)), initial=hash(())))[1:]

    def check(self):
        self.cache.check()
        held = [0] * self.pool.pages
        for node in self.cache.nodes():
            for page in (*node.pages, *(node.snapshot or ())):
                held[page] += 1
        for sequence in self.scheduler.running:
            for page in (*sequence.pages, *sequence.state):
                held[page] += 1
            self.check_sequence(sequence)
        assert held == [self.pool.holders(page) for page in range(self.pool.pages)]

    def check_sequence(self, sequence):
        rows = [row for page in sequence.pages for row in self.memory.content[page]][: sequence.computed]
        assert rows == self.digests(sequence.ids)[: sequence.computed], "a row is another's"

    def run(self, sequence, answer=1):
        while len(sequence.said) < answer:
            self.step()
        self.scheduler.finish(sequence)
        self.check()


GEOMETRIES = [(4, 4), (4, 16), (16, 4), (6, 4), (4, 6), (1, 3)]


def test_a_hit_that_leaves_no_room_is_given_up():
    """The shared page and the snapshot of the hit stay beside their copies: then the prompt has three
    pages, and needs four."""
    world = World(6, page_tokens=64, span=24, groups=2, budget=100)
    world.run(world.add(list(range(56))))
    again = world.add(list(range(65)))
    for _ in range(10):
        world.step()
    assert again.cached_tokens == 0 and again.said


def test_nothing_is_evicted_for_a_prompt_that_has_to_wait_all_the_same():
    world = World(30, page_tokens=4, span=4, groups=1, budget=100)
    world.run(world.add(list(range(9))))
    world.add(list(range(100, 140)))
    world.step()
    late = world.add(list(range(200, 280)))
    for _ in range(3):
        world.step()
    assert late in world.scheduler.waiting and world.cache.spans == 2 + 10


@pytest.mark.parametrize(("page_tokens", "span"), GEOMETRIES)
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_random_interleavings_never_mix_up_memory(page_tokens, span, groups):
    chance = random.Random(page_tokens * 100 + span * 10 + groups)
    world = World(pages=260 // page_tokens + 4 * groups, page_tokens=page_tokens, span=span, groups=groups, budget=11,
                  max_sequences=6, grid=2)  # fmt: skip
    bases = [[chance.randrange(3) for _ in range(60)] for _ in range(3)]
    alive = []
    hits = pre_empted = 0
    for _ in range(60 if page_tokens == 1 else 200):
        if chance.random() < 0.4 and len(alive) < 9:
            base = chance.choice(bases)
            ids = base[: chance.randrange(1, 60)] + [chance.randrange(3) for _ in range(chance.randrange(8))]
            alive.append(world.add(ids, chance.randrange(2)))
        world.step(lambda sequence: chance.randrange(3))
        for sequence in list(alive):
            if chance.random() < 0.1 or len(sequence.said) > 12:
                hits += bool(sequence.cached_tokens)
                pre_empted += sequence.preemptions
                world.scheduler.finish(sequence)
                alive.remove(sequence)
        if chance.random() < 0.01:
            world.cache.clear()
    assert hits > 1
    for sequence in alive:
        world.scheduler.finish(sequence)
    world.cache.clear()
    world.check()
    assert world.pool.free == world.pool.pages


def test_pages_run_out_and_everybody_still_gets_an_answer():
    world = World(pages=22, page_tokens=4, span=4, groups=1, budget=16, max_sequences=8)
    sequences = [world.add([i] * 20) for i in range(8)]
    for _ in range(400):
        world.step()
        for sequence in sequences:
            if len(sequence.said) >= 25 and sequence.status is not Status.FINISHED:
                world.scheduler.finish(sequence)
    assert all(sequence.status is Status.FINISHED for sequence in sequences)
    assert world.scheduler.preemptions > 0, "the pool was meant to be too small"


def test_second_request_with_the_same_beginning_hits_and_a_third_hits_where_they_parted():
    world = World(pages=200, page_tokens=4, span=4, groups=2, budget=1000, grid=4)
    common = list(range(40))
    world.run(world.add([*common, 1, 1, 1, 1, 1]))
    second = world.add([*common, 2, 2, 2, 2, 2])
    world.run(second)
    third = world.add([*common, 3, 3, 3, 3, 3])
    world.run(third)
    assert second.cached_tokens == 32 and second.match.limit == "snapshot" and second.match.latent_tokens == 40
    assert third.cached_tokens == 40 and third.match.limit == "latents"


@pytest.mark.parametrize("groups", [0, 1])
def test_requests_that_come_together_read_their_common_beginning_once(groups):
    world = World(pages=400, page_tokens=4, span=4, groups=groups, budget=16, max_sequences=8, grid=2)
    common = list(range(40))
    several = [world.add([*common, i, i, i]) for i in range(50, 55)]
    others = world.add([9] * 10)
    world.step()
    assert others.computed, "nobody else waits"
    for _ in range(60):
        world.step()
        for sequence in [*several, others]:
            if sequence.said and sequence.status is Status.RUNNING:
                world.scheduler.finish(sequence)
    assert [sequence.cached_tokens for sequence in several] == [0, 40, 40, 40, 40]


def test_one_token_is_always_left_to_compute():
    world = World(pages=50, page_tokens=4, span=4, groups=1, budget=100)
    world.run(world.add(list(range(16))))
    again = world.add(list(range(16)))
    world.run(again)
    assert again.cached_tokens == 12 and again.match.limit == "prompt"


def test_next_turn_goes_on_at_the_answers_last_boundary():
    world = World(pages=80, page_tokens=8, span=4, groups=1, budget=100, grid=100)
    first = world.add(list(range(10)))
    world.run(first, answer=9)  # 18 of its 19 tokens are read
    turn = world.add([*first.ids, 5, 5, 5])
    world.run(turn)
    assert turn.cached_tokens == 16
    kept = [node.depth * 4 for node in world.cache.nodes() if node.snapshot]
    assert 12 not in kept, "a boundary inside the answer was superseded"


def test_without_caching_nothing_is_registered_or_found():
    world = World(pages=50, page_tokens=4, span=4, groups=1, caching=False, budget=100)
    world.run(world.add(list(range(16))))
    again = world.add(list(range(16)))
    world.run(again)
    assert again.cached_tokens == 0 and world.cache.spans == 0 and world.pool.free == 50


def test_a_short_prompt_overtakes_long_ones_but_the_first_long_one_goes_on():
    world = World(pages=2000, page_tokens=4, span=512, groups=1, budget=32, max_sequences=8)
    long = [world.add([i] * 900) for i in range(5)]
    world.step()
    short = world.add([9] * 12)
    world.step()
    assert short.said and long[0].computed == 16 + 4, "half of the first step, and half of what long ones have then"


def test_long_prompts_have_a_quarter_of_a_step_that_others_wait_for_and_of_the_next_ones():
    world = World(pages=2000, page_tokens=4, span=512, groups=1, budget=32, max_sequences=8)
    long = [world.add([i] * 900) for i in range(3)]

    def read():
        return sum(piece.count for piece in world.step() if piece.sequence in long)

    assert read() == 32, "nobody else is there"
    short = world.add([9] * 12)
    assert read() == 4 and short.said, "the short one has the other half"
    assert [read() for _ in range(3)] == [8] * 3, "its answer waits for each step"
    world.scheduler.finish(short)
    assert [read() for _ in range(WATCHFUL_STEPS + 1)] == [8] * WATCHFUL_STEPS + [32], "and then all is theirs again"
    late = world.add([8] * 28)
    assert read() == 4 and late.said, "half of it is the first one's, whoever else is there"


@pytest.mark.parametrize(("budget", "most"), [(32, 8), (512, 8), (1024, 16)])
def test_of_many_that_come_at_once_some_begin_a_step_later(budget, most):
    """First those that came first and the shortest; nobody is passed over."""
    world = World(pages=2000, page_tokens=4, span=512, groups=1, budget=budget, max_sequences=64)
    many = [world.add([k] * (40 - k)) for k in range(40)]
    begun = []
    while len(begun) < len(many):
        world.step()
        fresh = {k for k, one in enumerate(many) if one.status is Status.RUNNING} - set(begun)
        assert len(fresh) == min(most, len(many) - len(begun))
        begun += sorted(fresh)
    assert set(begun[:most]) == {*range(most // 2), *range(40 - most // 2, 40)}


def test_where_making_ready_takes_long_four_begin_and_the_rest_later():
    world = World(pages=2000, page_tokens=4, span=512, groups=1, budget=512, max_sequences=64)
    world.scheduler.deciding_seconds = lambda: 1.0
    many = [world.add([k] * 9) for k in range(10)]
    begun = []
    for _ in range(3):
        world.step()
        begun.append(sum(one.status is Status.RUNNING for one in many))
    assert begun == [4, 8, 10]


def test_who_comes_after_all_have_gone_has_the_whole_budget():
    world = World(pages=2000, page_tokens=4, span=512, groups=1, budget=32, max_sequences=8)
    world.run(world.add([9] * 12))
    assert sum(piece.count for piece in (world.add([8] * 900), world.step())[1]) == 32


def test_the_first_long_prompt_is_never_starved_by_short_ones():
    """Short prompts come all the time, more of them than a step can read."""
    world = World(pages=4000, page_tokens=4, span=512, groups=1, budget=32, max_sequences=64)
    long = world.add([1] * 200)
    for _ in range(200 // 4 + 1):
        for _ in range(4):
            world.add([9] * 12)
        world.step()
        for sequence in list(world.scheduler.running):
            if sequence.said and sequence is not long:
                world.scheduler.finish(sequence)
    assert long.said


def test_places_are_kept_for_short_prompts():
    world = World(pages=4000, page_tokens=4, span=512, groups=1, budget=32, max_sequences=8)
    long = [world.add([i] * 900) for i in range(10)]
    world.step()
    assert sum(sequence.status is Status.RUNNING for sequence in long) == 6
    short = world.add([9] * 12)
    world.step()
    assert short.status is Status.RUNNING


def test_priority_goes_first_and_is_preempted_last():
    world = World(pages=40, page_tokens=4, span=4, groups=1, budget=8, max_sequences=1)
    later = world.add([1] * 8, priority=1)
    urgent = world.add([2] * 8, priority=0)
    world.step()
    world.step()
    assert urgent.said and not later.computed


def test_a_sequence_the_pool_cannot_hold_is_refused():
    world = World(pages=10, page_tokens=4, span=4, groups=2)
    with pytest.raises(ValueError, match="28 tokens do not fit; the pool holds 28"):
        world.add(list(range(28)))


def test_clearing_the_cache_disturbs_no_running_sequence():
    world = World(pages=60, page_tokens=4, span=4, groups=1, budget=6)
    sequence = world.add(list(range(21)))
    world.step()
    world.cache.clear()
    world.run(sequence, answer=10)
    assert len(sequence.said) == 10 and world.cache.spans == 0


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 200), st.integers(0, 40), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_layout_holds_a_state_in_every_group(mla, latent, kda, extra, state):
    layout = PageLayout.of(mla, latent, kda, state)
    assert sum(layout.groups) == kda and all(group * state <= layout.page_bytes for group in layout.groups)
    assert layout.page_bytes == (layout.page_tokens * mla * latent if mla else state)


def test_layout_refuses_pages_smaller_than_a_state():
    with pytest.raises(
        ValueError, match="page_tokens is 4; a page must hold the state of one KDA layer, so at least 8"
    ):
        PageLayout.of(2, 10, 3, 150, page_tokens=4)
    assert PageLayout.of(24, 1152, 69, 6_733_824).page_tokens == 256  # K3 in bf16 latents and float32 states
