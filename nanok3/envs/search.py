"""Search over documents that lie here: BM25 with an inverted index, and the two tools that use it.

    score(q, d) = sum over t in q of idf(t) f(t, d) (k + 1) / (f(t, d) + k (1 - b + b |d| / mean |d|))
    idf(t)      = log(1 + (N - n(t) + 1/2) / (n(t) + 1/2))

f counts the term in the document, n the documents that hold it; k = 1.2 and b = 0.75 are the usual values. Documents
are what this package ships, its own source, or whatever the caller reads (`data.documents`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nanok3.envs.environment import Task
from nanok3.envs.questions import AnswerEnvironment
from nanok3.envs.tools import ToolError, tool

K, B = 1.2, 0.75
PAGE = 1500

TOOLS = (
    tool("search", "Search the documents; the best five, each with a line of its text.", query="string"),
    tool("open", "Read a page of a document.", title="string", page_="integer"),
)


class Hit(NamedTuple):
    title: str
    score: float


def terms(text: str) -> list[str]:
    """Words and numbers in lower case; a name with underscores also by its parts."""
    words = re.findall(r"\w+", text.lower())
    return [*words, *(part for word in words if "_" in word for part in word.split("_") if part)]


class Index:
    """An inverted index of documents by title."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self.documents = dict(documents)
        self.lengths: dict[str, int] = {}
        self.postings: dict[str, dict[str, int]] = defaultdict(dict)
        for title, text in self.documents.items():
            counts = Counter(terms(f"{title} {text}"))
            self.lengths[title] = sum(counts.values())
            for term, count in counts.items():
                self.postings[term][title] = count
        self.mean = sum(self.lengths.values()) / max(1, len(self.lengths))

    def search(self, query: str, most: int = 5) -> list[Hit]:
        """The best documents, best first; equal scores by title."""
        scores: dict[str, float] = defaultdict(float)
        for term in terms(query):
            found = self.postings.get(term, {})
            idf = math.log(1 + (len(self.documents) - len(found) + 0.5) / (len(found) + 0.5))
            for title, count in found.items():
                length = 1 - B + B * self.lengths[title] / self.mean
                scores[title] += idf * count * (K + 1) / (count + K * length)
        return [Hit(*pair) for pair in sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:most]]

    def line(self, title: str, query: str) -> str:
        """The line of a document that shares most terms with the query."""
        wanted = set(terms(query))
        lines = [line.strip() for line in self.documents[title].splitlines() if line.strip()] or [""]
        return max(lines, key=lambda line: len(wanted & set(terms(line))))[:200]


def own_source() -> dict[str, str]:
    """The modules of this package: path -> source."""
    package = Path(__file__).parent.parent
    return {f"nanok3/{p.relative_to(package).as_posix()}": p.read_text() for p in sorted(package.rglob("*.py"))}


class SearchEnvironment(AnswerEnvironment):
    """A question over an index that all tasks share; the answer is compared exactly."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        if name == "search":
            query = arguments["query"]
            hits = self.index.search(query)
            return "\n".join(f"{hit.title}: {self.index.line(hit.title, query)}" for hit in hits) or "nothing was found"
        title, page = arguments["title"], arguments.get("page", 1)
        if title not in self.index.documents:
            raise ToolError(f"title is {title!r:.80}; there is no such document")
        text = self.index.documents[title]
        pages = max(1, -(-len(text) // PAGE))
        if not 1 <= page <= pages:
            raise ToolError(f"page is {page}; the document has pages 1 to {pages}")
        return f"page {page} of {pages}\n{text[(page - 1) * PAGE : page * PAGE]}"

    def fork(self) -> SearchEnvironment:
        other = SearchEnvironment(self.index)
        other.reset(self._task())
        other.restore(self.snapshot())
        return other


def with_tools(task: Task, steps: int = 8) -> Task:
    """A question as a task that may search."""
    return replace(task, tools=TOOLS, budget=replace(task.budget, steps=steps))
