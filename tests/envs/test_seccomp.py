"""The filter, run by a small machine of our own: what it decides for calls of both architectures."""

from __future__ import annotations

import struct

import pytest

from nanok3.envs.seccomp import CLONE, CLONE3, IOCTL, REFUSED, SOCKET, filter_program

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def decide(program, number, architecture, *arguments):
    data = struct.pack("<IIQ6Q", number, architecture, 0, *[*arguments, 0, 0, 0, 0, 0, 0][:6])
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at = value = 0
    while True:
        code, yes, no, constant = steps[at]
        at += 1
        if code == 0x20:
            value = struct.unpack_from("<I", data, constant)[0]
        elif code == 0x06:
            return constant
        else:
            truth = {0x15: value == constant, 0x45: bool(value & constant), 0x35: value >= constant}[code]
            at += yes if truth else no


@pytest.mark.parametrize("machine", MACHINES)
def test_decisions(machine):
    column, architecture = MACHINES[machine]
    program = filter_program(machine)

    def of(number, *arguments):
        return decide(program, number, architecture, *arguments)

    refused = {numbers[column] for numbers in REFUSED.values()}
    special = {CLONE[column], CLONE3[column], IOCTL[column], SOCKET[column]}
    for number in range(500):
        if number not in special:
            assert of(number) == (EPERM if number in refused else ALLOW), number
    assert of(CLONE[column], 0x01200011) == ALLOW and of(CLONE[column], 0x003D0F00) == ALLOW  # fork, a thread
    assert of(CLONE[column], 0x10000000) == EPERM and of(CLONE[column], 0x00020000) == EPERM
    assert of(CLONE3[column]) == ENOSYS
    assert of(IOCTL[column], 0, 0x5412) == EPERM and of(IOCTL[column], 0, 0x5401) == ALLOW
    assert of(SOCKET[column], 1) == ALLOW and of(SOCKET[column], 2) == EPERM and of(SOCKET[column], 16) == EPERM
    assert decide(program, 0, 0x40000003) == KILL
    assert len(program) % 8 == 0 and len(program) // 8 < 4096


def test_the_second_door_of_x86():
    assert decide(filter_program("x86_64"), 0x40000000 + 1, 0xC000003E) == EPERM


def test_a_machine_without_a_table():
    assert filter_program("riscv64") is None
