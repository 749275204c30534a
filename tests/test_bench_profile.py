"""bench/profile_step.py: which part an event counts for, and a picture that holds every bar."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
        yield importlib.import_module("profile_step")


@dataclass
class Event:
    """What torch.profiler records of an operator."""

    name: str
    self_cpu_time_total: float
    cpu_parent: Event | None = None
    sequence_nr: int = -1
    scope: int = 0
    cpu_children: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.cpu_parent is not None:
            self.cpu_parent.cpu_children.append(self)


def test_time_goes_to_the_innermost_scope_and_backward_to_its_forward(bench):
    step = Event("the step", 1e6)
    layer = Event("module: expert products", 5e6, step)
    product = Event("aten::mm", 7e6, layer, sequence_nr=3)
    kernel = Event("kernel: KDA", 11e6, layer)
    inner = Event("nanok3::kda_fwd", 13e6, layer, sequence_nr=4)
    back = Event("autograd::engine::evaluate_function: MmBackward0", 17e6, step, sequence_nr=3)
    node = Event("MmBackward0", 19e6, back, sequence_nr=3, scope=1)
    deep = Event("aten::mm", 23e6, node)
    lost = Event("aten::cat", 29e6, step)
    events = [step, layer, product, kernel, inner, back, node, deep, lost]
    found = bench.seconds_of_parts(events, cost_of_scope=0.5)
    # The step holds one scope and the layer another, each of which costs half a second.
    assert found == {
        bench.PYTHON: 1 + 5 - 0.5 - 0.5,
        bench.EXPERTS: 7 + 17 + 19 + 23,
        bench.MEMORY: 11 + 13,
        bench.OTHER: 29,
    }


def test_parts_below_half_a_per_cent_have_no_bar(bench):
    panel = bench.panel_of("a step", 1.0, {"much": 0.996, "little": 0.004})
    assert panel.title == "A step: 1.00 s" and [bar.name for bar in panel.bars] == ["much"]
    assert panel.bars[0].told == "100%, 996 ms"


@pytest.mark.parametrize(("seconds", "said"), [(2.345, "2.35 s"), (0.01234, "12.3 ms"), (5e-5, "50 µs")])
def test_durations(bench, seconds, said):
    assert bench.duration(seconds) == said


def test_the_picture_is_a_whole_file_with_every_name(bench):
    faults = {"user": 3.0, "system": 1.0, "faults": 2000.0}
    panels = [bench.panel_of("a step", 1.0, {"x < y": 1.0}), bench.fault_panel({"default": faults, "kept": faults})]
    root = ElementTree.fromstring(bench.picture(panels, "parts & wholes"))
    said = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "x < y" in said and said.count("25% system, 2k faults") == 2
    paper, *bars = root.iter("{http://www.w3.org/2000/svg}rect")
    assert paper.get("fill") == "white" and len(bars) == 1 + 2 * 2
    assert float(bars[1].get("width")) == pytest.approx(3 * float(bars[2].get("width")), rel=1e-2)
