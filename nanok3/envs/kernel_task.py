"""A kernel task: make this numpy function faster. First it must be right, then it is timed, from outside.

    score = 0                                   an output is wrong, or it is not twice as fast: noise is no gain
          | 0.5 log(b / t) / log(b / e)         between the baseline b and the expert e, at most 0.5
          | 0.5 + 0.5 (e - t) / (e - bound)     from the expert towards the bound: bytes moved / memory bandwidth

Every round draws a seed that nobody knew before. First the work alone answers some rounds; then four programs in four
sandboxes answer each, one after the other in turning order: the work, the baseline, the expert, and one that returns at
once, whose time is taken off the others'. Each makes the inputs from the seed and returns its whole output, which is
compared to nine digits, in float64, with our own. So a cached result is wrong, a clock that was tampered with is not
read, lower precision is seen, and there is no verifier to be read inside. A program's time is the least of its rounds;
on a busy machine the expert's own code was given 0.5 in six of eight trials and up to 0.88 in the others.

Source: report 4.2 (error above the threshold 0, equal to the expert 0.5, towards the roofline 1; detectors of cached
inputs and reduced precision). Kernels, sizes and the logarithm are ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np

from nanok3.envs.bubblewrap import Bubblewrap, python
from nanok3.envs.coding import TOOLS, Coding
from nanok3.envs.environment import Budget, Task, Verdict
from nanok3.envs.process import Process
from nanok3.envs.questions import distinct
from nanok3.envs.sandbox import Limits

ROUNDS, ASK_SECONDS, GAIN = 12, 5.0, 0.5
NOISE, RESOLUTION = 0.8, 5e-5
"""Times within a fifth of the expert's are the expert's, and so are all that are too short to be told apart."""


class Kernel(NamedTuple):
    """What it computes, a slow body, the expert's body, and the inputs; `n` is a size."""

    says: str
    slow: str
    expert: str
    inputs: str
    size: tuple[int, int]


KERNELS = {
    "moving": Kernel(
        "the sums of every 50 neighbours of x",
        "return np.array([sum(x[i:i + 50]) for i in range(len(x) - 49)])",
        "c = np.concatenate([[0.0], np.cumsum(x)])\n    return c[50:] - c[:-50]",
        "(g.standard_normal({n}),)",
        (3000, 5000),
    ),
    "nearest": Kernel(
        "for every row of x the least squared distance to a row of y",
        "return np.array([min(sum((a - b) ** 2) for b in y) for a in x])",
        "return ((x[:, None] - y[None]) ** 2).sum(-1).min(1)",
        "(g.standard_normal(({n}, 8)), g.standard_normal(({n}, 8)))",
        (50, 90),
    ),
    "histogram": Kernel(
        "how often each of 0 to 99 stands in x, as float64",
        "return np.array([float(sum(x == v)) for v in range(100)])",
        "return np.bincount(x, minlength=100).astype(np.float64)",
        "(g.integers(0, 100, {n}),)",
        (2000, 4000),
    ),
    "product": Kernel(
        "the matrix product of x and y",
        "return np.array([[sum(r * c) for c in y.T] for r in x])",
        "return x @ y",
        "(g.standard_normal(({n}, {n})), g.standard_normal(({n}, {n})))",
        (40, 60),
    ),
}

_DRIVER = """
import os, sys
out = os.fdopen(os.dup(1), "wb", 0)
os.dup2(2, 1)
import base64, json
import numpy as np
inputs = eval(f"lambda g: {json.loads(sys.stdin.readline())}", {"np": np})
sys.path.insert(0, ".")
try:
    from kernel import f
except BaseException as error:
    print(type(error).__name__, error, file=sys.stderr)
    f = None
out.write(b"ready\\n")
for line in sys.stdin:
    try:
        result = f(*inputs(np.random.default_rng(int(line))))
        assert result.dtype == np.float64
        text = json.dumps([list(result.shape), base64.b64encode(np.ascontiguousarray(result)).decode()])
    except BaseException as error:
        text = json.dumps([type(error).__name__, ""])
    out.write(text.encode() + b"\\n")
"""


def source(name: str, body: str) -> str:
    arguments = "x, y" if KERNELS[name].inputs.count("g.") == 2 else "x"
    return f"import numpy as np\n\n\ndef f({arguments}):\n    {body}\n"


def speed_score(work: float, baseline: float, expert: float, bound: float) -> float:
    """0 to 1 from four times in seconds."""
    if not work < GAIN * baseline:
        return 0.0
    if work >= NOISE * expert:
        return min(0.5, 0.5 * math.log(baseline / work) / math.log(baseline / expert))
    return min(1.0, 0.5 + 0.5 * (expert - work) / max(expert - bound, 1e-9))


def output(answer: bytes) -> np.ndarray | None:
    """The array that a program returned, or None."""
    try:
        shape, text = json.loads(answer)
        return np.frombuffer(base64.b64decode(text, validate=True), np.float64).reshape(shape)
    except (ValueError, TypeError):
        return None


def bandwidth() -> float:
    """Bytes a second that this machine copies."""
    a = np.zeros(1 << 20)
    b, best = np.empty_like(a), math.inf
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(b, a)
        best = min(best, time.perf_counter() - began)
    return 2 * a.nbytes / best


class Trial:
    """The four programs, asked in turn with the same seeds."""

    def __init__(self, task: Task, box: Bubblewrap) -> None:
        self.kernel, self.inputs = KERNELS[task.hidden["kernel"]], task.hidden["inputs"]
        name = task.hidden["kernel"]
        bodies = {"baseline": self.kernel.slow, "expert": self.kernel.expert, "nothing": "return np.zeros(1)"}
        self.boxes = {"work": box.fork()}
        for role, body in bodies.items():
            self.boxes[role] = box.home.open({"kernel.py": source(name, body).encode()})
        self.programs: dict[str, Process] = {}
        self.seconds = dict.fromkeys(self.boxes, math.inf)
        space: dict[str, Any] = {"np": np}
        exec(source(name, self.kernel.expert), space)  # ours
        self.expected, self.make = space["f"], eval(f"lambda g: {self.inputs}", {"np": np})

    def start(self, *roles: str) -> None:
        for role in roles:
            limits = Limits(seconds=60, output=4 << 20, memory=1 << 30)
            self.programs[role] = self.boxes[role].start([*python(), "-c", _DRIVER], limits)
            self.programs[role].ask(json.dumps(self.inputs).encode(), 20)

    def round(self) -> bool:
        """One seed for all; whether the work was right."""
        seed = secrets.randbelow(1 << 62)
        arrays = self.make(np.random.default_rng(seed))
        self.moved = sum(array.nbytes for array in arrays)
        wanted = self.expected(*arrays)
        roles = list(self.programs)
        first = seed % len(roles)  # who comes after the slow one finds the caches cold
        for role in roles[first:] + roles[:first]:
            program = self.programs[role]
            began = time.perf_counter()
            answer = program.ask(str(seed).encode(), ASK_SECONDS)
            self.seconds[role] = min(self.seconds[role], time.perf_counter() - began)
            found = output(answer)
            if role == "work" and (found is None or found.shape != wanted.shape or not self._close(found, wanted)):
                return False
        return True

    def _close(self, found: np.ndarray, wanted: np.ndarray) -> bool:
        return bool(np.allclose(found, wanted, rtol=1e-9, atol=1e-9))

    def score(self) -> float:
        floor = self.seconds["nothing"]
        work, baseline, expert = (max(self.seconds[r] - floor, RESOLUTION) for r in ("work", "baseline", "expert"))
        return speed_score(work, baseline, min(expert, baseline / 2), self.moved / bandwidth())

    def close(self) -> None:
        for program in self.programs.values():
            program.close()
        for box in self.boxes.values():
            box.close()


class KernelEnvironment(Coding):
    """The coding environment with a clock. Its sandboxes need numpy: `Sandboxes(packages=("numpy",))`."""

    def judge(self, hidden: bool) -> Verdict:
        box = self._box()
        assert isinstance(box, Bubblewrap), "programs are asked line by line"
        trial = Trial(self._task(), box)
        try:
            for roles in (("work",), ("baseline", "expert", "nothing")):
                trial.start(*roles)
                if not all(trial.round() for _ in range(ROUNDS)):
                    return Verdict(0.0, "an output is wrong, of another shape or type, or there is none")
                if not hidden:
                    return Verdict(0.0, f"right; {1e3 * trial.seconds['work']:.2f} ms with the way there")
                if len(trial.programs) == 1:
                    trial.seconds["work"] = math.inf  # it was alone: all are timed under the same conditions
        except (TimeoutError, EOFError) as error:
            return Verdict(0.0, str(error))
        finally:
            trial.close()
        return Verdict(trial.score())


def kernel_tasks(split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Kernels with sizes drawn by the seed, until there are no more."""
    found = distinct("kernel", _draw, lambda pair: f"{pair[0]} {pair[1]}", split, seed)
    return (kernel_task(name, size) for name, size in found)


def _draw(random: Random) -> tuple[str, int]:
    name = random.choice(list(KERNELS))
    return name, random.randint(*KERNELS[name].size)


def kernel_task(name: str, size: int) -> Task:
    """One of KERNELS for inputs of a size."""
    kernel = KERNELS[name]
    goal = f"Make f in kernel.py faster. It returns {kernel.says}; inputs have size {size}. Only numpy is there."
    slow, expert = source(name, kernel.slow), source(name, kernel.expert)
    solved = {"calls": [["write_file", {"path": "kernel.py", "content": expert}]]}
    hidden = {"kernel": name, "inputs": kernel.inputs.format(n=size), "solution": [solved, {"text": "Done."}]}
    state = {"files": {"kernel.py": slow}}
    code = hashlib.blake2b(f"{name} {size}".encode(), digest_size=6).hexdigest()
    return Task(f"kernel/{code}", "coding", goal, state, hidden, TOOLS, Budget(steps=12))
