"""What the report says of conversations: counts of each kind, and the last held-out loss of each."""

from nanok3.train.report_conversations import has_conversations, taught
from nanok3.train.run_record import Run


def test_counts_and_losses_by_channel():
    side = {"conversations": 1200, "given": 5000, "think": 700, "response": 90, "tools": 0, "end": 44}
    facts = {"step": 0, "train": side, "held_out": {**side, "conversations": 7}, "skipped": 3}
    losses = {"step": 9, "slices": {"think": {"loss": 0.5}, "end": {"loss": 0.25}}}
    run = Run("x", records={"conversations": [facts], "eval": [losses]})
    text = taught(run)
    assert has_conversations(run) and not has_conversations(Run("x"))
    assert "1,200 conversations, and 7 held out" in text and "3 were longer than a row" in text
    assert "<td>thinking</td><td>700</td><td>700</td><td>0.500</td>" in text and "<td>0.250</td>" in text
    assert "<td>calls</td><td>0</td><td>0</td><td></td>" in text
    bare = taught(Run("x", records={"conversations": [{**facts, "skipped": 0}]}))
    assert "longer than a row" not in bare and "0.500" not in bare
