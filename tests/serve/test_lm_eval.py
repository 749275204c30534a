"""lm-eval's own `local-completions` over HTTP: its log-likelihoods and texts are those of one forward pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from served import TOKENIZER

import nanok3
from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.serve.generate import generate
from nanok3.serve.sampler import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'lm-eval[api]'"),
]
ROOT = Path(__file__).parents[2]
QUESTIONS = [
    {"text": "The sky is", "good": " blue", "bad": " a fish, wet and flat"},
    {"text": "Two and two make", "good": " four", "bad": " a very long word of ten"},
    {"text": "Å", "good": "ngström", "bad": "x"},
]
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: "{{[good, bad]}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITE = """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: good
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model")
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(TOKENIZER.vocab_size + 64)
    nanok3.save(K3(cfg), path)
    TOKENIZER.save(path)
    return path


@pytest.fixture(scope="module")
def samples(folder, tmp_path_factory):
    """What lm-eval logged of each task: one run over both."""
    here = tmp_path_factory.mktemp("tasks")
    (here / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("choice", CHOICE), ("write", WRITE)):
        (here / f"{name}.yaml").write_text(text.replace("FILE", str(here / "questions.jsonl")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(here / "cache"), "HF_DATASETS_OFFLINE": "1"}
    serve = [sys.executable, "-m", "nanok3", "serve", str(folder), "--port", "0", "--memory", "0.02"]
    serve += ["--dtype", "float32", "--device", "cpu", "--hash-block", "16", "--served-model-name", "k3"]
    with subprocess.Popen(serve, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" on ")[1].split("/v1")[0]
            asked = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "choice,write"]
            asked += ["--model_args", f"model=k3,base_url={address}/v1/completions,num_concurrent=2,max_length=4096"]
            asked += ["--include_path", str(here), "--output_path", str(here / "out"), "--log_samples"]
            done = subprocess.run(asked, cwd=here, env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-3000:]
        finally:
            server.kill()
    logged = {}
    for file in (here / "out").rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        logged[file.name.split("_")[1]] = sorted(lines, key=lambda line: line["doc_id"])
    return logged


def test_log_likelihoods_are_the_models_own(folder, samples):
    model = nanok3.load(folder, dtype=torch.float32)
    assert len(samples["choice"]) == len(QUESTIONS)
    for question, sample in zip(QUESTIONS, samples["choice"]):
        for words, ((logprob, greedy),) in zip((question["good"], question["bad"]), sample["resps"], strict=True):
            context, ids = TOKENIZER.encode(question["text"]), TOKENIZER.encode(question["text"] + words)
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
            wanted = rows.gather(1, torch.tensor(ids[len(context) :])[:, None]).sum()
            assert float(logprob) == pytest.approx(float(wanted), abs=1e-3)
            assert (str(greedy) == "True") == (rows.argmax(-1).tolist() == ids[len(context) :])


def test_texts_are_the_models_own(folder, samples):
    model = nanok3.load(folder, dtype=torch.float32)
    assert len(samples["write"]) == len(QUESTIONS)
    for question, sample in zip(QUESTIONS, samples["write"]):
        params = SamplingParams(temperature=0.0, max_tokens=8, stop=("\n\n",))
        assert sample["resps"][0][0].strip() == generate(model, TOKENIZER, question["text"], params).text.strip()
