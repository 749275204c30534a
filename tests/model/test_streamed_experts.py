"""Experts read from disk give the bits of resident ones, are read once a chunk, and stay within their memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import nanok3
from nanok3.config import K3Config, with_expert_format
from nanok3.model.decoder import K3
from nanok3.model.native_decode import NativeDecoder
from nanok3.model.streamed_experts import ExpertFiles, ExpertForm, Stored, slots_of, stream_of
from nanok3.model.weights import DTYPES, disk_tensors, load, save
from nanok3.quant.qat import QAT, mxfp8_inputs

EXPERT = 6_528
"""Bytes of an expert of the tiny model in MXFP4: 3 x 64 x 64 weights of 4.25 bits."""
TOP_K = 2

pytestmark = pytest.mark.usefixtures("unchecked")  # a thread's every call would be checked, too


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> a tiny checkpoint; MXFP4 in many shards, bf16 and float32 in one file."""
    torch.manual_seed(0)
    model = K3(K3Config.tiny()).eval()
    root = tmp_path_factory.mktemp("checkpoints")
    save(model, root / "mxfp4", experts="mxfp4", max_shard_bytes=200_000)
    save(model, root / "bf16", experts="bf16")
    save(model, root / "float32", experts="bf16", dtype=torch.float32)
    return {kind: root / kind for kind in ("mxfp4", "bf16", "float32")}


def ids(n=17, batch=1):
    return torch.randint(0, K3Config.tiny().vocab_size, (batch, n), generator=torch.Generator().manual_seed(n))


def streamed(folder, memory, dtype=None):
    return load(folder, dtype=dtype, experts="stream", expert_memory=memory)


@torch.no_grad()
def both_ways(model, tokens, chunk=5):
    """Logits of one pass, and of a state that reads a chunk at a time."""
    state = model.new_state(len(tokens))
    parts = [model(tokens[:, i : i + chunk], state=state).logits for i in range(0, tokens.shape[1], chunk)]
    return model(tokens).logits, torch.cat(parts, 1)


# ------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("slots", [TOP_K, 7, 1000])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mxfp4", None),
        ("mxfp4", torch.float32),
        ("mxfp4", torch.float64),
        ("bf16", None),
        ("bf16", torch.float32),
        ("float32", None),
    ],
)
def test_logits_are_those_of_resident_experts_bit_for_bit(folders, kind, dtype, slots):
    size = EXPERT if kind == "mxfp4" else 3 * 64 * 64 * (2 if kind == "bf16" else 4)
    model = streamed(folders[kind], slots * size, dtype)
    assert stream_of(model).slots.size == min(slots, 4 * 8)
    for ours, resident in zip(both_ways(model, ids()), both_ways(load(folders[kind], dtype=dtype), ids())):
        assert torch.equal(ours, resident)


def test_without_the_kernel(folders, monkeypatch):
    from nanok3.kernels import linear_cpu

    monkeypatch.setattr(linear_cpu, "expert_answers", lambda *_: NotImplemented)
    monkeypatch.setattr(linear_cpu, "routed", lambda *_: NotImplemented)
    ours, resident = streamed(folders["mxfp4"], 7 * EXPERT), load(folders["mxfp4"])
    for one, other in zip(both_ways(ours, ids()), both_ways(resident, ids())):
        torch.testing.assert_close(one, other)


def test_a_batch_and_several_threads(folders):
    model, resident = streamed(folders["mxfp4"], 3 * EXPERT), load(folders["mxfp4"])
    wanted, found = both_ways(resident, ids(9, 3))[1], []
    threads = [threading.Thread(target=lambda: found.append(both_ways(model, ids(9, 3))[1])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(torch.equal(logits, wanted) for logits in found)


def test_kimi_linear_without_a_latent(golden_linear, tmp_path):
    resident = load(golden_linear)
    save(resident, tmp_path, experts="bf16")
    model = load(tmp_path, experts="stream", expert_memory=1 << 30)
    tokens = ids(9) % model.cfg.vocab_size
    for ours, other in zip(both_ways(model, tokens), both_ways(load(tmp_path), tokens)):
        assert torch.equal(ours, other)


@pytest.fixture
def golden_linear():
    from tests.conftest import FIXTURES

    return FIXTURES / "text" / "d_kimi_linear_6l"


# ------------------------------------------------------------------ what is read


def count_reads(model):
    """Keys in the order in which they are read from now on."""
    stream, read = stream_of(model), []
    original = stream.files.read
    stream.files.read = lambda key, into: (read.append(key), original(key, into))[1]
    return read


@pytest.mark.parametrize("slots", [TOP_K, 5])
def test_each_expert_is_read_once_a_chunk_though_memory_is_smaller(folders, slots):
    model = streamed(folders["mxfp4"], slots * EXPERT)
    read = count_reads(model)
    out = model(ids(), return_hidden=True)
    chosen = [(l, e) for l, routing in out.hidden.router.items() for e in routing.chosen.unique().tolist()]
    assert len(chosen) > 4 * slots and sorted(read) == chosen


def test_the_statistics_add_up(folders):
    model = streamed(folders["mxfp4"], 1000 * EXPERT)
    stream = stream_of(model)
    assert stream.statistics.reads == stream.statistics.bytes == 0  # nothing is read while loading
    read = count_reads(model)
    model(ids())
    model(ids())
    found = stream.statistics
    assert found.reads == found.hits == len(read) == len(set(read)) and found.hit_rate == 0.5
    assert found.bytes == found.reads * EXPERT and found.seconds_reading > 0
    assert stream.memory == 32 * EXPERT


def test_shared_experts_are_computed_while_the_thread_reads(folders):
    """The reader waits for the shared experts, which wait for it to have begun: neither could go first alone."""
    model = streamed(folders["mxfp4"], 4 * EXPERT)
    stream, begun, computed = stream_of(model), threading.Event(), threading.Event()
    original = stream.files.read

    def read(key, into):
        begun.set()
        assert computed.wait(10)
        return original(key, into)

    def shared(*_):
        assert begun.wait(10)
        computed.set()

    stream.files.read = read
    layers = [layer for layer in model.model.layers if model.cfg.is_moe(layer.layer)]
    layers[0].feed_forward.shared_experts.register_forward_hook(shared)
    model(ids(3))


def test_neighbours_in_a_file_are_one_read(tmp_path, monkeypatch):
    file = tmp_path / "x"
    file.write_bytes(bytes(range(100)))
    files = ExpertFiles({(0, 0): {"a": Stored(file, 10, 5), "b": Stored(file, 15, 5), "c": Stored(file, 40, 2)}})
    calls, original = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda n, b, o: (calls.append(o), original(n, [b[0][:3], *b[1:]][:1], o))[1])
    into = {"a": bytearray(5), "b": bytearray(5), "c": bytearray(2)}
    assert files.read((0, 0), into) == 12  # in pieces of 3, as a system may
    assert (*into["a"], *into["b"], *into["c"]) == (*range(10, 20), 40, 41)
    calls.clear()
    monkeypatch.setattr(os, "preadv", lambda n, b, o: (calls.append(o), original(n, b, o))[1])
    files.read((0, 0), into)
    assert calls == [10, 40]


# ------------------------------------------------------------------ mistakes


def test_a_budget_below_one_layers_choice_is_refused(folders):
    with pytest.raises(ValueError, match=rf"expert_memory is {2 * EXPERT - 1}; it must be at least {2 * EXPERT} bytes"):
        streamed(folders["mxfp4"], 2 * EXPERT - 1)
    form = ExpertForm({"w1": ((4, 8), torch.float32)})
    assert slots_of(300, form, 2, 10) == 2 and slots_of(10**9, form, 2, 10) == 10


def test_other_words_and_devices_are_refused(folders):
    with pytest.raises(ValueError, match="experts is 'disk'; allowed: 'resident' or 'stream'"):
        load(folders["mxfp4"], experts="disk")
    with pytest.raises(ValueError, match="expert_memory is 5; it needs experts='stream'"):
        load(folders["mxfp4"], expert_memory=5)
    with pytest.raises(ValueError, match="on device cuda"):
        load(folders["mxfp4"], experts="stream", device="cuda")
    with pytest.raises(ValueError, match=r"dtype is torch.bfloat16, but streamed experts are read as stored"):
        load(folders["float32"], dtype=torch.bfloat16, experts="stream")


def test_a_model_without_experts_is_refused(tmp_path):
    cfg = K3Config.tiny()
    save(K3(replace(cfg, first_k_dense_replace=cfg.num_hidden_layers)), tmp_path)
    with pytest.raises(ValueError, match="no routed experts; allowed: 'resident'"):
        load(tmp_path, experts="stream")


@pytest.fixture
def copy(folders, tmp_path):
    return shutil.copytree(folders["bf16"], tmp_path / "copy")


def test_a_file_that_was_cut_is_told(copy):
    model = streamed(copy, 1 << 20)
    os.truncate(copy / "model.safetensors", 1000)
    with pytest.raises(ValueError, match=r"truncated: an expert's bytes at \d+, the file ends at 1000"):
        model(ids())


def test_a_file_that_was_written_to_is_told_and_a_state_stays(copy):
    model = streamed(copy, 2 * 3 * 64 * 64 * 2)
    state = model.new_state(1)
    model(ids(3), state=state)
    with open(copy / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(copy / "model.safetensors", (1, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"model\.safetensors: changed while its experts were being read"):
            model(ids(3), state=state)
    assert state.tokens == 3


def test_training_rounding_and_saving_are_refused(folders, tmp_path):
    model = streamed(folders["mxfp4"], 4 * EXPERT)
    with pytest.raises(ValueError, match="experts='resident' to train"):
        model.train()(ids(3))
    model.eval()
    with pytest.raises(ValueError, match="are streamed"):
        save(model, tmp_path)
    with pytest.raises(ValueError, match="are streamed"):
        mxfp8_inputs(model)
    with pytest.raises(ValueError, match="are streamed"):
        QAT(model, "w4a16")
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="experts='resident' to train"):
        model(ids(3))


def test_native_decoding_steps_aside(folders):
    reason = NativeDecoder.of(streamed(folders["mxfp4"], 4 * EXPERT))
    assert isinstance(reason, str) and "StreamedMoE" in reason


def test_the_thread_and_the_files_go_with_the_model(folders):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    model = streamed(folders["mxfp4"], 4 * EXPERT)
    model(ids(3))
    del model
    for thread in [t for t in threading.enumerate() if t.name.startswith("experts")]:
        thread.join(10)
        assert not thread.is_alive()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------ memory

LIMITED = """
import resource, sys
import torch
from nanok3.model.weights import load

folder, memory, room = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.mm(torch.ones(8, 8), torch.ones(8, 8))
def private():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (private() + room,) * 2)
model = load(folder, experts="stream" if memory else "resident", expert_memory=memory or None)
ids = [1, 2, 3]
state = model.new_state(1)
with torch.no_grad():
    logits = model(torch.tensor([ids]), state=state).logits
    for _ in range(12):
        ids.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([ids[-1:]]), state=state).logits
print(*ids)
"""


def generate_within(folder, memory, room):
    """Greedy tokens of a process that may take `room` bytes of private memory beyond what Python and torch have."""
    command = [sys.executable, "-c", LIMITED, str(folder), str(memory), str(room)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 320 MB, nearly all of it experts of random codes."""
    cfg = replace(K3Config.tiny(), num_experts=384, moe_intermediate_size=256, routed_expert_hidden_size=512)
    cfg = with_expert_format(cfg, "mxfp4")
    folder, random = tmp_path_factory.mktemp("large"), torch.Generator().manual_seed(0)
    tensors = {}
    for name, spec in disk_tensors(cfg).items():
        if name.endswith(("_scale", "A_log")):
            tensors[name] = torch.full(spec.shape, 121 if spec.dtype == "U8" else 0, dtype=DTYPES[spec.dtype])
        elif spec.dtype == "U8":
            tensors[name] = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=random)
        else:
            tensors[name] = torch.randn(spec.shape, generator=random).to(DTYPES[spec.dtype]) / 8
    save_file(tensors, folder / "model.safetensors")
    cfg.to_json(folder / "config.json")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts private memory against RLIMIT_DATA")
def test_four_times_larger_than_an_enforced_limit(large):
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    room, memory = size // 4, size // 16
    free = generate_within(large, 0, 64 * size)
    assert free.returncode == 0, free.stderr
    resident = generate_within(large, 0, room)
    if resident.returncode == 0:
        pytest.skip("this system lets a process pass RLIMIT_DATA")
    assert "memory" in resident.stderr.lower()
    limited = generate_within(large, memory, room)
    assert limited.returncode == 0, limited.stderr
    assert limited.stdout == free.stdout and len(free.stdout.split()) == 15


def test_the_public_name_takes_them(folders):
    model = nanok3.load(folders["mxfp4"], experts="stream", expert_memory=4 * EXPERT)
    assert stream_of(model).slots.size == 4 and stream_of(nanok3.load(folders["mxfp4"])) is None
