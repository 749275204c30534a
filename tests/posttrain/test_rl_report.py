"""The page of a run: numbers, curves, samples; nothing of a sample becomes markup."""

import json
import math

from nanok3.posttrain.rl_report import write_rl_report
from nanok3.train.track import Tracker


def test_the_page_of_an_expert(tmp_path):
    track = Tracker(tmp_path)
    for step in range(1, 6):
        numbers = {"reward": step / 10, "accuracy": step / 8, "thinking": 20 - step, "output": 40.0, "tau": 2.0}
        track.write(
            "rl", step, **numbers, masked=0.01, withheld=0.0, lag=1.0, lag_max=2, zero_variance=0.3, grad_norm=math.nan
        )
    track.write("eval", 5, accuracy=0.625, thinking=15.5, output=40.0, truncated=0.0, count=200)
    track.write("sample", 1, prompt="<script>alert(1)</script>", text="4,5 & 9", reward=-1.0)
    track.close()
    (tmp_path / "config.yaml").write_text("domain: general\n")
    page = write_rl_report(tmp_path).read_text()
    for words in (
        "Reward and accuracy of rollouts",
        "Tokens of an answer",
        "0.625",
        "reward -1.0",
        "4,5 &amp; 9",
        "general",
    ):
        assert words in page, words
    assert "<script>" not in page and "Gradient norm" not in page and "Teachers and student" not in page
    assert page.count("<svg") == 6


def test_the_page_of_a_student(tmp_path):
    Tracker(tmp_path).write("mopd", 1, reverse_kl=0.5, accuracy=0.5)
    scores = {"accuracy": 0.75, "thinking": 9.25, "output": 20.0, "truncated": 0.0, "count": 100}
    rows = [{"domain": "general", "effort": "low", "teacher": scores, "student": scores | {"accuracy": 0.5}}]
    (tmp_path / "table.json").write_text(json.dumps(rows))
    page = write_rl_report(tmp_path).read_text()
    assert "Distance to the teachers" in page and "0.750" in page and "0.500" in page and "9.2" in page


def test_an_empty_run_says_so(tmp_path):
    assert "No iteration has ended yet" in write_rl_report(tmp_path).read_text()
