"""`nanok3 doctor`: what it says follows from facts, and a backend that computes wrong ends it with status 1."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch

from nanok3.eval.exactness import Backend, Check, Operator
from nanok3.eval.exactness_model import EQUALITIES
from nanok3.kernels import native
from nanok3.stages import doctor, doctor_machine
from nanok3.stages.doctor import Route, all_checks, backends, check_lines, reason, route_lines, routes_of
from nanok3.stages.doctor_advice import advice
from nanok3.stages.doctor_machine import Built, Facts, Library, cpu_quota, libraries, memory, without_kernels
from nanok3.stages.doctor_operators import OPERATORS
from nanok3.stages.doctor_speed import Rates, Speed, measure_operator

FACTS = Facts(
    processor="a processor",
    system="Linux",
    cores=4,
    quota=None,
    threads=4,
    load=0.1,
    flags=("avx2", "fma"),
    memory=16 * 2**30,
    memory_free=12 * 2**30,
    gpus=(),
    compiler="g++: g++ 12",
    torch="2.13.0+cpu",
    blas="mkl",
    wait_policy="passive",
    libraries=(Library("torch", "2.13.0", ""), Library("pillow", "12", "vision"), Library("fla-core", None, "gpu")),
    kernels=(Built("kda", 3.0, None), Built("norms", None, None)),
)
FINE_KERNEL = Built("norms", None, None)
RATES = Rates(multiply_add=1e11, float32=9e10, bfloat16=9e10, read=1e10, copy=2e10)
NAMES = {operator.name: operator for operator in OPERATORS}


# ---------------------------------------------------------------------- advice


def test_a_good_machine_gets_no_advice():
    assert advice(FACTS, RATES) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compiler": None}, r"No C\+\+ compiler that works: .* forms\. Install"),
        ({"compiler": None, "kernels": (Built("kda", None, "it hangs"),)}, r"torch forms \(it hangs\)\. Install"),
        (
            {"kernels": (Built("kda", None, "a full disk"), Built("norms", None, "a full disk"))},
            "^No kernel can be built.*: a full disk$",
        ),
        (
            {"kernels": (Built("kda", None, "g++ failed on kda.cpp"), FINE_KERNEL)},
            r"kda kernel cannot be built.*g\+\+ failed",
        ),
        ({"threads": 8}, "8 threads on 4 cores.*--threads 4"),
        ({"quota": 1.5}, "4 threads on 1.5 cores.*--threads 1"),
        ({"wait_policy": "active"}, "OMP_WAIT_POLICY is 'active'"),
        ({"load": 9.0}, "load is 9.0 on 4 cores"),
        ({"torch": "2.9.1"}, "torch 2.9.1 is older than 2.10"),
        ({"memory_free": 2**30}, "1.0 GiB of memory are free"),
        ({"gpus": ("a card",)}, "A GPU without fla-core"),
        ({"libraries": (Library("pillow", None, "vision"),)}, r"vision \(pictures as input\).*nanok3\[vision\]"),
    ],
)
def test_advice_names_what_to_change(change, said):
    lines = advice(replace(FACTS, **change), RATES)
    assert any(re.search(said, line) for line in lines), lines


def test_advice_follows_the_measured_products():
    (fast,) = advice(FACTS, replace(RATES, bfloat16=3e11))
    assert "train with bfloat16" in fast
    (slow,) = advice(FACTS, replace(RATES, bfloat16=1e9))
    assert "1.0 GFLOP/s, float32 90" in slow
    (blas,) = advice(FACTS, replace(RATES, float32=2e10, bfloat16=2e10))
    assert "less than 40 %" in blas
    (loaded,) = advice(replace(FACTS, load=9.0), replace(RATES, float32=2e10, bfloat16=2e10))
    assert "The load is 9.0" in loaded


# ---------------------------------------------------------------------- facts


def test_the_quota_of_a_container(tmp_path):
    file = tmp_path / "cpu.max"
    assert cpu_quota(file) is None
    file.write_text("max 100000\n")
    assert cpu_quota(file) is None
    file.write_text("150000 100000\n")
    assert cpu_quota(file) == 1.5


def test_memory_by_name(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    assert (memory("MemTotal", file), memory("MemAvailable", file)) == (2 * 2**20, 2**20)
    assert memory("Swap", file) is None


def test_every_extra_of_the_package_is_listed_but_dev():
    found = {(library.name, library.extra) for library in libraries()}
    assert {("torch", ""), ("pillow", "vision"), ("fla-core", "gpu")} <= found
    assert not any(extra == "dev" for _, extra in found)
    assert {extra for _, extra in found} <= {"", *doctor_machine.EXTRAS}


def test_what_cannot_be_built_says_why(monkeypatch):
    def fail(name):
        raise native.BuildError("no C++ compiler found")

    monkeypatch.setattr(native, "build", fail)
    assert {built.error for built in doctor_machine.build_kernels()} == {"no C++ compiler found"}


def test_a_library_that_does_not_load_is_told(monkeypatch, tmp_path):
    """A compiler that wrote something else, or what the library needs is not there."""
    (tmp_path / "kda.so").write_bytes(b"no library")
    monkeypatch.setattr(native, "build", lambda name: tmp_path / "kda.so")
    assert all("kda.so: file too short" in built.error for built in doctor_machine.build_kernels())


@pytest.mark.parametrize("script", [None, b"\x7fELF" + bytes(60), b"#!/bin/sh\nexec sleep 30\n"])
def test_a_compiler_that_is_none_does_not_end_it(script, monkeypatch, tmp_path):
    if script is not None:
        (tmp_path / "g++").write_bytes(script)
        (tmp_path / "g++").chmod(0o755)
    monkeypatch.setattr(native, "_useless", {})
    monkeypatch.setattr(native, "ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin" if script else str(tmp_path))
    if script is None or doctor_machine.shutil.which("g++") == str(tmp_path / "g++"):
        assert doctor_machine.compiler() is None


# ---------------------------------------------------------------------- which backend


def test_routes_come_from_running_the_operator():
    routes = list(routes_of(NAMES["KDA, one token"], FACTS))
    assert [route.dtype for route in routes] == ["float32", "bfloat16"]
    if native.available("kda"):
        assert {(route.inference, route.training) for route in routes} == {("kda_cpu.step", "kda_cpu.kda")}
    with without_kernels():
        routes = list(routes_of(NAMES["RMSNorm"], FACTS))
        assert {(route.inference, route.why) for route in routes} == {
            ("torch", "norms_cpu.rms_norm does not take these inputs")
        }
        broken = replace(FACTS, kernels=(Built("norms", None, "no compiler"),))
        assert {route.why for route in routes_of(NAMES["RMSNorm"], broken)} == {"norms cannot be built here"}
    assert reason([], FACTS, "torch is as fast") == "torch is as fast"


def test_a_second_line_only_where_bfloat16_goes_another_way():
    route = doctor.Route("linear", "cpu", "float32", "torch.mm", "torch.mm", "why")
    same = replace(route, dtype="bfloat16")
    assert len(list(route_lines([route, same]))) == 1
    _, second = route_lines([route, replace(same, inference="linear_cpu.linear")])
    assert second.split() == ["in", "bfloat16", "linear_cpu.linear;", "training", "torch.mm", "(why)"]


# ---------------------------------------------------------------------- checks


def test_all_backends_of_this_machine_are_checked():
    assert [backend.name for backend in backends(FACTS)] == ["kernels", "torch"]
    assert [backend.name for backend in backends(replace(FACTS, kernels=()))] == ["torch"]
    assert backends(replace(FACTS, gpus=("a card",)))[-1] == Backend("cuda", device="cuda")


def test_the_table_shows_every_backend_and_what_failed():
    good = Check("x, float32", "kernels", 1e-7, 1e-5), Check("x, float32, gradients", "kernels", 2e-7, 3e-5)
    bad = Check("x, float32", "torch", 1.0, 1e-5), Check("x, float32, gradients", "torch", 2e-7, 3e-5)
    heading, line = check_lines([*good, *bad])
    assert heading.split() == ["kernels", "torch", "bound"]
    assert line.split()[-1] == "FAILED" and "1e-7 / 2e-7" in line and "1e+0 / 2e-7" in line


def test_all_tables_fit_into_a_terminal(monkeypatch):
    """Of 80 columns, with a column for each of two backends."""
    names = [*(f"{operator.name}, bfloat16" for operator in OPERATORS), *(name for name, *_ in EQUALITIES)]
    checks = [Check(f"{name}{part}", b, 1e-7, 1e-5) for name in names for part in ("", ", gradients") for b in "kt"]
    many = tuple(Library(f"a-long-name-{i}", "1.2.3+cpu", "vision") for i in range(20))
    speeds = [Speed(operator.name, 1.0, 1e12, "peak", 1e12) for operator in OPERATORS]
    way = "attention_cpu.causal_attention"
    routes = [Route(operator.name, "cpu", "float32", way, f"{way} and 3 more", "our kernel") for operator in OPERATORS]
    facts = replace(FACTS, libraries=many)
    lines = [*check_lines(checks), *doctor.library_lines(facts), *route_lines(routes)]
    lines += [*doctor.speed_lines(replace(RATES, multiply_add=None), speeds), *map(doctor.kernel_line, facts.kernels)]
    assert len(lines) > 60 and [line for line in lines if len(line) > 78] == []
    advised = doctor.wrapped("Install " + "one thing, " * 20, 2)
    assert len(advised) > 2 and all(line.startswith("  ") for line in advised[1:])


def test_without_a_compiler_the_limit_is_what_was_measured():
    """Reading memory is measured by a kernel, and so is the peak."""
    unknown = replace(RATES, multiply_add=None, read=None)
    small = replace(NAMES["linear"], draw=lambda draw: (torch.ones(8, 8), torch.ones(8, 8)))
    speed = measure_operator(replace(small, flops=None, reads=lambda x, w: w.nbytes), unknown)
    assert (speed.limited_by, speed.limit) == ("copy", RATES.copy)
    (products, copied, _) = doctor.speed_lines(unknown, [speed])
    assert "float32 (the known peak)" in products and copied.startswith("copying memory")


def test_speed_is_beside_the_right_limit():
    small = replace(NAMES["linear"], draw=lambda draw: (torch.ones(8, 8), torch.ones(8, 8)))
    speed = measure_operator(small, RATES)
    assert (speed.limited_by, speed.limit) == ("peak", 1e11)
    assert speed.per_second == pytest.approx(2 * 8**3 / speed.seconds)
    moved = measure_operator(replace(small, flops=None), RATES)
    assert (moved.limited_by, moved.limit) == ("copy", 2e10)
    assert moved.per_second == pytest.approx(3 * 8 * 8 * 4 / moved.seconds)
    read = measure_operator(replace(small, flops=None, reads=lambda x, w: w.nbytes), RATES)
    assert (read.limited_by, read.limit) == ("read", 1e10)
    assert read.per_second == pytest.approx(8 * 8 * 4 / read.seconds)


# ---------------------------------------------------------------------- the command


def wrong(x):
    return 1.1 * x


BROKEN = Operator("broken", wrong, lambda x: x, lambda draw: (draw(3, 4),))


def raising(x):
    raise RuntimeError("a broken build")


RAISING = replace(BROKEN, run=raising)
FINE = replace(BROKEN, run=lambda x: x.clone())


@pytest.mark.parametrize(("operator", "failed"), [(FINE, False), (BROKEN, True), (RAISING, True)])
def test_a_broken_operator_ends_it_with_status_1(operator, failed, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    with pytest.raises(SystemExit) if failed else nullcontext() as ended:
        doctor.main(doctor.DoctorArgs(threads=1, json=file), [operator], [])
    assert not failed or ended.value.code == 1
    said = capsys.readouterr().out
    assert ("do not trust" in said) == failed
    found = json.loads(file.read_text())
    assert found.keys() == {"facts", "routes", "checks", "rates", "speeds", "advice"}
    assert {check["ok"] for check in found["checks"] if check["what"].startswith("broken, float32")} == {not failed}
    for title in ("Machine", "Libraries", "Kernels", "What every operator runs on", "Exactness", "Speed", "What to"):
        assert title in said


def test_failures_are_told_also_where_the_record_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda *_: {"checks": [{"ok": False}, {"ok": True}]})
    monkeypatch.setattr("nanok3.data.files.write_file", mock.Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        doctor.main(doctor.DoctorArgs(threads=1, json=tmp_path / "x.json"))
    assert "1 of 2 checks FAILED" in capsys.readouterr().out


def test_a_broken_backend_is_told_from_a_good_one():
    """An operator that is right with kernels and wrong without."""
    half = replace(FINE, run=lambda x: x.clone() if native.load("kda") else wrong(x))
    checks = list(all_checks([half], backends(FACTS), []))
    verdicts = {(check.backend, check.ok) for check in checks if check.what.startswith("broken")}
    assert verdicts == {("kernels", native.available("kda")), ("torch", False)}


def test_threads_out_of_range_are_named():
    with pytest.raises(ValueError, match="threads is 0; it must lie between 1 and 1024"):
        doctor.main(doctor.DoctorArgs(threads=0))
