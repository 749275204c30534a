"""`nanok3 rl`: mistakes that are told before anything is trained."""

from pathlib import Path

import pytest

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.posttrain.domains import small_tokenizer
from nanok3.posttrain.rl_settings import RLSettings
from nanok3.stages.rl import RLArgs, domain_called, main


def test_a_domain_that_is_none():
    assert domain_called("agent").name == "agent"
    with pytest.raises(ValueError, match="domain is 'poetry'; allowed: 'general', 'agent', 'coding'"):
        domain_called("poetry")


def test_a_base_model_is_refused(tmp_path):
    tokenizer = small_tokenizer()
    save(K3(K3Config.tiny().at_depth(4).with_vocabulary(tokenizer.vocab_size)), tmp_path)
    tokenizer.save(tmp_path)
    args = RLArgs(model=tmp_path, out=tmp_path / "run", train=RLSettings(iterations=1), device="cpu")
    with pytest.raises(ValueError, match="is a base model; teach it to answer first"):
        main(args)
    assert not (tmp_path / "run").exists()


def test_the_length_is_four_minutes_where_nothing_is_said():
    assert (RLArgs(model=Path("x")).train.minutes, RLArgs(model=Path("x")).train.iterations) == (4.0, None)
