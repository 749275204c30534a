"""Tasks made from documents: a graph of what they hold, grown from coarse to fine, and questions about its leaves.

    graph      file -> class or function -> parameter, field, first line     edges point to what is finer
    question   a leaf and its ancestors in a sentence; the leaf's text is the answer
    kept       if the answer is found again by an independent way, from the documents alone
             | and no other leaf fits the same sentence
             | and it was not asked before

Names that stand in several files become one node with several parents, which is where questions of two steps come
from ("the file in which ..."). Growth stops at nodes that hold nothing finer.

Source: report 4.2: a graph grown by agents from seed nodes, equal nodes reused, until atomic; sampled nodes, keywords,
retrieval, a task of a chosen type. Here the parser of Python grows it, so every answer is exact; sentences are
templates. With another model at hand its questions can be put through the same three checks (`checked`).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from nanok3.envs.environment import Task
from nanok3.envs.questions import Item, answer_task, items
from nanok3.envs.search import Index, with_tools


@dataclass
class Node:
    """A thing in the documents. `parents` are the coarser nodes that hold it."""

    kind: str
    name: str
    parents: list[Node] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    text: str = ""


class Graph:
    """Nodes by (kind, name); equal ones are one."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, str], Node] = {}

    def node(self, kind: str, name: str, parent: Node | None = None, text: str = "") -> Node:
        made = self.nodes.setdefault((kind, name), Node(kind, name, text=text))
        if parent is not None and parent not in made.parents:
            made.parents.append(parent)
            parent.children.append(made)
        return made

    def of(self, kind: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.kind == kind]


def grow(documents: Mapping[str, str]) -> Graph:
    """The graph of Python files; a document that is none is left out."""
    graph = Graph()
    for path, text in documents.items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        file = graph.node("file", path, text=_first_line(tree))
        for child in tree.body:
            if isinstance(child, ast.ClassDef):
                made = graph.node("class", child.name, file, _first_line(child))
                for line in child.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        graph.node("field", f"{child.name}.{line.target.id}", made)
            elif isinstance(child, ast.FunctionDef):
                made = graph.node("function", child.name, file, _first_line(child))
                for at, each in enumerate(child.args.args):
                    graph.node("parameter", f"{child.name}.{at}", made, each.arg)
    return graph


def _first_line(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").split("\n")[0].strip()


def questions(graph: Graph) -> Iterator[Item]:
    """Every question of every template; those with more than one answer are left out."""
    found: dict[str, list[Item]] = defaultdict(list)
    for item in _templates(graph):
        found[item.question].append(item)
    for same in found.values():
        if len({item.answer for item in same}) == 1:
            yield same[0]


def _templates(graph: Graph) -> Iterator[Item]:
    for kind in ("class", "function"):
        for node in graph.of(kind):
            for parent in node.parents:
                question = f"In which file is the {kind} {node.name} defined? Give its path."
                yield Item(question, (f"search {node.name}",), parent.name, f"file {kind} {node.name}")
                if node.text:
                    question = f"Which {kind} is described as: {node.text!r}?"
                    yield Item(question, (f"search {node.text}",), node.name, f"described {kind} {node.text}")
            count = sum(child.kind == "field" for child in node.children)
            if count and len(node.parents) == 1:
                question = f"How many annotated fields does the body of the class {node.name} have?"
                yield Item(question, (f"open {node.parents[0].name}",), str(count), f"fields {node.name}")
    for node in graph.of("parameter"):
        function, at = node.name.rsplit(".", 1)
        if len(node.parents[0].parents) == 1 and at == "0":
            file = node.parents[0].parents[0].name
            question = f"What is the name of the first parameter of the function {function} in {file}?"
            yield Item(question, (f"open {file}",), node.text, f"parameter {file} {function}")


class Lines:
    """The documents as lines, and where the lines stand that begin a class or a function at the left edge."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self.lines = {path: text.splitlines() for path, text in documents.items()}
        self.starts: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for path, lines in self.lines.items():
            for at, line in enumerate(lines):
                if begin := re.match(r"(class|def) (\w+)", line):
                    self.starts[f"{begin[1].replace('def', 'function')} {begin[2]}"].append((path, at))

    def after(self, what: str) -> list[list[str]]:
        """The lines of every such class or function, up to the next line at the left edge."""
        found = []
        for path, at in self.starts[what]:
            body = self.lines[path][at:]
            end = next((i for i, line in enumerate(body) if i and line and line[0] not in " )"), len(body))
            found.append(body[:end])
        return found


def rechecked(item: Item, lines: Lines) -> bool:
    """Whether the answer is found in the documents without the graph, by looking at lines."""
    kind, _, rest = item.key.partition(" ")
    if kind == "file":
        return [path for path, _ in lines.starts[rest]] == [item.answer]
    if kind == "described":
        what, said = rest.split(" ", 1)
        return any(said in line for body in lines.after(f"{what} {item.answer}") for line in body)
    if kind == "parameter":
        name = rest.split(" ")[1]
        texts = ["\n".join(body) for body in lines.after(f"function {name}")]
        return len(texts) == 1 and re.findall(r"^def \w+\(\s*(\w+)", texts[0]) == [item.answer]
    bodies = lines.after(f"class {rest}")
    fields = [line for body in bodies for line in body if re.match(r"    [a-zA-Z_]\w*\s*:(?!:)\s*\S", line)]
    return len(bodies) == 1 and str(len(fields)) == item.answer


def checked(found: Iterable[Item], documents: Mapping[str, str]) -> Iterator[Item]:
    """Those whose answer is found again and that were not asked before."""
    seen: set[str] = set()
    lines = Lines(documents)
    for item in found:
        plain = " ".join(item.question.lower().split())
        if plain not in seen and item.answer and rechecked(item, lines):
            seen.add(plain)
            yield item


def synthesised_tasks(index: Index, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Questions over the documents of an index, in an order of the seed, with search as a tool."""
    pool = list(questions(grow(index.documents)))
    Random(seed).shuffle(pool)
    order = checked(pool, index.documents)
    nothing = Item("", (), "", "")
    for item in items("synthesised", lambda random: next(order, nothing), split, seed):
        if item != nothing:
            yield with_tools(answer_task("synthesised", item))
