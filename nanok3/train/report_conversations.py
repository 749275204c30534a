"""Of a run that learned conversations: how much there was of each kind, and the loss of each channel over time."""

from __future__ import annotations

from nanok3.train.run_record import Record, Run, mapping_of, number
from nanok3.train.svg import escape

CHANNELS = {
    "think": "thinking",
    "response": "answers",
    "tools": "calls",
    "end": "ends of messages",
    "given": "given: prompts and results, not learned",
}


def has_conversations(run: Run) -> bool:
    return bool(run.kind("conversations"))


def taught(run: Run) -> str:
    """A table: tokens of each kind, and the last held-out loss of each that is learned."""
    facts = run.kind("conversations")[-1]
    train, held_out = mapping_of(facts, "train"), mapping_of(facts, "held_out")
    slices = mapping_of(run.kind("eval")[-1], "slices") if run.kind("eval") else {}
    rows = "".join(_row(name, says, train, held_out, slices) for name, says in CHANNELS.items())
    skipped = number(facts.get("skipped")) or 0
    left_out = f" {skipped:.0f} were longer than a row and left out." if skipped else ""
    return (
        f"<p>{_count(train, 'conversations')} conversations, and {_count(held_out, 'conversations')} held out. The "
        f"loss is on tokens that the model samples, and on no others.{left_out}</p>\n"
        "<table><thead><tr><th>tokens</th><th>learned</th><th>held out</th><th>held-out loss, nats a token</th></tr>"
        f"</thead><tbody>{rows}</tbody></table>"
    )


def _row(name: str, says: str, train: Record, held_out: Record, slices: Record) -> str:
    loss = number(mapping_of(slices, name).get("loss"))
    cells = [escape(says), _count(train, name), _count(held_out, name), "" if loss is None else f"{loss:.3f}"]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _count(facts: Record, name: str) -> str:
    found = number(facts.get(name))
    return "" if found is None else f"{found:,.0f}"
