"""`nanok3 posttrain`: the plan that the flags name is run, and its end is told."""

import pytest
import tyro

from nanok3.posttrain import pipeline
from nanok3.posttrain.pipeline import QUICK, SMALL
from nanok3.stages.posttrain import PosttrainArgs, main


@pytest.mark.parametrize("quick, plan", [(True, QUICK.times(0.5)), (False, SMALL.times(0.5))])
def test_the_plan_of_the_flags_is_run_in_the_folder(tmp_path, monkeypatch, quick, plan):
    ran = []

    def run(self):
        ran.append((self.plan, self.out))
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.Pipeline, "run", run)
    with pytest.raises(KeyboardInterrupt):
        main(PosttrainArgs(out=tmp_path, quick=quick, times=0.5))
    assert ran == [(plan, tmp_path)]


def test_flags():
    args = tyro.cli(PosttrainArgs, args=["--quick", "--times", "2", "--preset", "small"])
    assert args.quick and args.times == 2
    for wrong, message in (({"threads": 0}, "threads is 0"), ({"times": -1.0}, "times is -1.0")):
        with pytest.raises(ValueError, match=message):
            main(PosttrainArgs(**wrong))
