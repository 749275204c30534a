"""Every kind of task in one table, and how to open its environment. What a kind needs is said where it is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from nanok3.data.bfcl import MPMATH
from nanok3.envs.bfcl import KINDS as BFCL
from nanok3.envs.bfcl import BfclEnvironment, bfcl_tasks
from nanok3.envs.bubblewrap import Sandboxes, check
from nanok3.envs.coding import Coding
from nanok3.envs.coding_tasks import KINDS as CODING
from nanok3.envs.coding_tasks import coding_tasks, mbpp_tasks
from nanok3.envs.environment import Environment, Task
from nanok3.envs.general import KINDS as GENERAL
from nanok3.envs.general import general_tasks
from nanok3.envs.gvisor import Containers
from nanok3.envs.gym import SETS, GymEnvironment, gym_tasks
from nanok3.envs.kernel_task import KernelEnvironment, kernel_tasks
from nanok3.envs.office import KINDS as OFFICE
from nanok3.envs.office import Office, office_tasks
from nanok3.envs.questions import AnswerEnvironment
from nanok3.envs.search import Index, SearchEnvironment, own_source
from nanok3.envs.small_world import Ledger, Workbench, small_tasks
from nanok3.envs.synthesise import synthesised_tasks
from nanok3.envs.visual import SUBJECTS, VisualEnvironment, visual_tasks

Home = Sandboxes | Containers
Opener = Callable[[Home | None], Environment]


@dataclass(frozen=True)
class Kind:
    """`tasks(split, seed)` is a stream; `open(sandboxes)` an environment that plays it."""

    name: str
    domain: str
    tasks: Callable[[str, int], Iterator[Task]]
    open: Opener
    needs: str = ""
    packages: tuple[str, ...] = ()


@cache
def source_index() -> Index:
    return Index(own_source())


def _in_process(environment: type[Environment]) -> Opener:
    return lambda _: environment()


def _sandboxed(environment: Callable[[Any], Environment], anywhere: bool = False) -> Opener:
    """anywhere: also in gVisor; what asks a running program line by line needs bubblewrap."""

    def open_one(home: Home | None) -> Environment:
        if home is None:
            raise ImportError(f"code is only run in a sandbox, and there is none: {check()}")
        if not anywhere and not isinstance(home, Sandboxes):
            raise ValueError("sandbox is 'gvisor'; allowed for this kind: 'bubblewrap', which asks line by line")
        return environment(home)

    return open_one


def search_tasks(split: str, seed: int) -> Iterator[Task]:
    return synthesised_tasks(source_index(), split, seed)


def _mbpp(split: str, seed: int) -> Iterator[Task]:
    """Always in the order of the set."""
    return mbpp_tasks(split)


def kinds() -> dict[str, Kind]:
    """All of them by name."""
    found = [Kind(k, "general", partial(general_tasks, k), lambda _: AnswerEnvironment()) for k in GENERAL]
    found += [
        Kind(f"gym-{name}", "general", partial(gym_tasks, name), lambda _: GymEnvironment(), "reasoning-gym")
        for name in SETS
    ]
    found += [Kind(k, "agent", partial(office_tasks, k), lambda _: Office()) for k in OFFICE]
    small: dict[str, tuple[str, type[Environment]]] = {
        "buttons": ("general", AnswerEnvironment),
        "ledger": ("agent", Ledger),
        "program": ("coding", Workbench),
    }
    found += [Kind(k, d, partial(small_tasks, k), _in_process(e)) for k, (d, e) in small.items()]
    found.append(Kind("search", "agent", search_tasks, lambda _: SearchEnvironment(source_index())))
    box = "bubblewrap"
    needs = f"{box}, 2 MB by pip"
    found += [Kind(k, "agent", partial(bfcl_tasks, k), _sandboxed(BfclEnvironment), needs, (MPMATH,)) for k in BFCL]
    found += [Kind(k, "coding", partial(coding_tasks, k), _sandboxed(Coding, True), box) for k in CODING]
    found.append(Kind("mbpp", "coding", _mbpp, _sandboxed(Coding, True), f"{box}, 86 MB by pip"))
    found.append(Kind("kernel", "coding", kernel_tasks, _sandboxed(KernelEnvironment), box, ("numpy",)))
    found += [Kind(k, "visual", partial(visual_tasks, k), lambda _: VisualEnvironment(), "Pillow") for k in SUBJECTS]
    return {kind.name: kind for kind in found}
