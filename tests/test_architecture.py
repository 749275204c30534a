"""The shape of the code: who may import whom, how little a reader of one mechanism must read, what importing costs.

The rules are those of the design: what K3 is (model) knows nothing of how it learns (train) or runs (serve), those two
do not know each other, and what needs a device or an optional package is imported where it is used.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanok3"
FILES = sorted(PACKAGE.rglob("*.py"))
BASE = {"config", "model"}

# package (or single file at the top) -> what of ours it may import besides itself
MAY_IMPORT = {
    "official": set(),
    "config": {"official"},
    "kernels": set(),
    "ledger": {"config", "official"},
    "capacity": {"config", "ledger", "official"},
    "model": {"config", "kernels"},
    "ops": {"model"},
    "data": {"config"},
    "baselines": BASE,
    "quant": BASE | {"kernels"},
    "train": BASE | {"baselines", "data", "kernels", "quant", "ledger"},
    "serve": BASE | {"data", "quant"},
    "envs": {"data"},
    "posttrain": BASE | {"train", "serve", "envs", "data", "baselines", "quant", "ledger"},
    "eval": BASE | {"serve", "envs", "baselines", "data"},
    "distributed": BASE | {"train"},
    "cli": {"stages", "config"},
    "__main__": {"cli"},
    "__init__": BASE | {"data", "ops"},
    "stages": None,  # everything
}
# files whose imports inside functions are what `--help` must not wait for
LAZY = ("nanok3/__init__.py", "nanok3/cli.py", "nanok3/stages/")
OPTIONAL = {"fla", "PIL", "pyarrow", "matplotlib", "wandb", "tensorboard", "transformers"}
OPTIONAL |= {"av", "resvg_py", "reasoning_gym", "ray"}
OPTIONAL |= {"openai", "fastapi", "starlette", "uvicorn", "h11", "prometheus_client", "llguidance"}
MECHANISMS = ["kda", "mla", "attn_res", "latent_moe", "situ", "short_conv", "moonvit", "mxfp4", "cache", "splice"]
CLOSURE = 4
DOCUMENTS = {"nanok3.official"}  # the official config.json as data, without code to follow
"""Of our files, besides its own, that a reader of one mechanism needs at most."""


def name_of(path):
    """nanok3/model/kda.py -> nanok3.model.kda; a package goes by its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@functools.cache
def imports(path):
    """(module, 'top' | 'function' | 'typing') of every import statement in a file; of ours down to the file."""
    found = []

    def visit(node, where):
        for child in ast.iter_child_nodes(node):
            inner = where
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = "function"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                inner = "typing"
            if isinstance(child, ast.Import):
                found.extend((alias.name, inner) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative imports hide where a name comes from"
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    found.append((whole if whole in MODULES else child.module, inner))
            visit(child, inner)

    visit(ast.parse(path.read_text()), "top")
    return found


def ours(path, *kinds):
    return [module for module, kind in imports(path) if module.split(".")[0] == "nanok3" and kind in kinds]


def part(module):
    """The package or top-level file that a module belongs to."""
    steps = module.split(".")
    return steps[1] if len(steps) > 1 else "__init__"


def area(path):
    steps = path.relative_to(PACKAGE).parts
    return steps[0] if len(steps) > 1 else path.stem


def where(path):
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------ who imports whom


def test_every_package_has_a_rule():
    assert {area(path) for path in FILES} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("path", FILES, ids=where)
def test_imports_keep_to_the_rules(path):
    allowed = MAY_IMPORT[area(path)]
    for module in ours(path, "top", "function", "typing"):
        target = part(module)
        if target in (area(path), "__init__"):
            continue  # its own package, or the record of public names
        assert allowed is None or target in allowed, f"{where(path)} may not import {module}"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_nobody_imports_the_stages_or_the_command_line(path):
    for module in ours(path, "top", "function", "typing"):
        if part(module) == "stages":
            assert area(path) in ("stages", "cli")
        if part(module) == "cli":
            assert path.name == "__main__.py"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_kernels_are_imported_where_they_are_used(path):
    """Device code is a leaf that must not be needed to read, or to import, what uses it."""
    if area(path) not in ("kernels", "stages"):
        assert not [m for m in ours(path, "top") if part(m) == "kernels"]


@pytest.mark.parametrize("path", FILES, ids=where)
def test_imports_stand_at_the_top(path):
    """But for kernels, optional packages, and what `--help` must not load."""
    if where(path).startswith(LAZY):
        return
    for module, kind in imports(path):
        if kind != "function" or module.split(".")[0] in sys.stdlib_module_names:
            continue
        optional = module.split(".")[0] in OPTIONAL or module == "torch.utils.tensorboard"
        assert optional or (module.startswith("nanok3.kernels")), f"{where(path)} imports {module} inside a function"


@functools.cache
def graph(*kinds):
    """module -> the modules of ours that it imports; a package counts only if its __init__ imports something."""
    edges = {}
    for name, path in MODULES.items():
        edges[name] = {m for m in ours(path, *kinds) if m in MODULES and m != name}
    return edges


def test_there_are_no_cycles():
    edges, done, path = graph("top"), set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for other in sorted(edges[module]):
            visit(other)
        path.pop()
        done.add(module)

    for module in edges:
        visit(module)
    assert done == edges.keys()


def closure(module, edges):
    seen, queue = set(), [module]
    while queue:
        for other in edges[queue.pop()] - seen:
            seen.add(other)
            queue.append(other)
    return seen - {module}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_reader_of_one_mechanism_needs_few_files(mechanism):
    needed = closure(f"nanok3.model.{mechanism}", graph("top")) - DOCUMENTS
    assert len(needed) <= CLOSURE, sorted(needed)


def test_the_closure_is_measured_right():
    """kda needs the config, the basics, its state and the short convolution."""
    files = {"nanok3.config", "nanok3.model.basics", "nanok3.model.cache", "nanok3.model.short_conv"}
    assert closure("nanok3.model.kda", graph("top")) == files | DOCUMENTS


# ------------------------------------------------------------------ what importing costs


def run(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


BLOCK = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[2].split(","):
    importlib.import_module(name)
"""


def test_every_module_imports_without_optional_packages():
    absent = sorted(OPTIONAL | {"datasets", "triton", "tensorboardX", "llguidance", "prometheus_client", "av", "ray"})
    modules = [name for name in MODULES if not name.endswith("__main__")]
    result = run(BLOCK, ",".join(absent), ",".join(modules))
    assert result.returncode == 0, result.stderr


HEAVY = ["matplotlib", "transformers", "fla", "torch._dynamo", "triton", "PIL", "pyarrow", "pandas", "IPython"]


def loaded(code):
    result = run(f"{code}\nimport sys\nprint('\\n'.join(sys.modules))")
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    modules = loaded("import nanok3; nanok3.K3; nanok3.load; nanok3.save; nanok3.K3Config.tiny(); nanok3.Tokenizer")
    assert "torch" in modules and not modules.intersection(HEAVY)


def test_the_command_line_does_not_wait_for_torch():
    modules = loaded("import nanok3, nanok3.cli; nanok3.K3Config.tiny()")
    assert not modules.intersection(["torch", "numpy", "tiktoken", *HEAVY])


def test_public_names_are_there():
    import nanok3

    for name in nanok3.__all__:
        assert getattr(nanok3, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = nanok3.nothing


def test_the_operators_under_one_name():
    """nanok3.ops re-exports and adds nothing."""
    from nanok3 import ops
    from nanok3.model import attn_res, kda, latent_moe, situ

    assert (ops.attn_res, ops.kda) == (attn_res.mix, kda.kda)
    assert (ops.latent_moe, ops.situ_glu) == (latent_moe.routed, situ.situ_glu)
    assert sorted(ops.__all__) == ["attn_res", "kda", "latent_moe", "situ_glu"]


# ------------------------------------------------------------------ house rules


@pytest.mark.parametrize("path", FILES, ids=where)
def test_every_shape_is_written_as_a_string(path):
    """`Float[Tensor, D]` names an undefined D, and the whole function then goes unchecked without a word; it must be
    `Float[Tensor, " D"]`."""
    kinds = {"Float", "Int", "Bool", "UInt8", "Shaped", "Num", "Integer", "Complex", "Int64", "Int32", "Float32"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            assert isinstance(node.slice, ast.Tuple), f"line {node.lineno}"
            shape = node.slice.elts[1]
            literal = isinstance(shape, ast.Constant) and (shape.value is Ellipsis or isinstance(shape.value, str))
            assert literal, f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_a_file_begins_with_its_idea(path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "no docstring"
    future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    annotated = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)
    assert future or not annotated, "from __future__ import annotations"


@functools.cache
def test_sources():
    return {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


test_sources.__test__ = False


@pytest.mark.parametrize("path", [p for p in FILES if not p.name.startswith("__")], ids=where)
def test_every_file_has_its_test(path):
    """By name, in the mirrored folder; or a test that imports it."""
    folder = ROOT / "tests" / path.relative_to(PACKAGE).parent
    if (folder / f"test_{path.stem}.py").exists():
        return
    package, module = name_of(path).rsplit(".", 1)
    used = re.compile(rf"\b{re.escape(name_of(path))}\b|from {re.escape(package)} import [^\n]*\b{module}\b")
    assert any(used.search(text) for text in test_sources().values()), f"no test for {where(path)}"


def test_test_files_have_names_of_their_own():
    names = [path.name for path in test_sources()]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_known_mistake_has_a_test_that_bears_its_number():
    """Rows 1 to 33 of the mistakes seen in other implementations."""
    text = "\n".join(text for path, text in test_sources().items() if path != Path(__file__))
    numbers = {int(n) for n in re.findall(r"def test_item_(\d\d)_", text)}
    assert numbers >= set(range(1, 34))


def tracked():
    """The text files of the repository: those git knows, or where there is no git, all of the usual folders."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = [p for d in ("nanok3", "tests", "docs", "bench") for p in (ROOT / d).rglob("*")] + [*ROOT.glob("*.*")]
    binary = {".safetensors", ".png", ".jpg", ".jpeg", ".model", ".parquet", ".zst", ".gz", ".bin", ".pyc", ".so"}
    return [p for p in paths if p.is_file() and p.suffix not in binary]


def test_no_file_knows_the_machine_it_was_written_on():
    """No absolute path of a machine and no host of a package registry."""
    words = [
        r"/wo" + "rk/",
        r"/ro" + "ot/",
        r"/ho" + r"me/(?!runner|user|me\b)",
        "py" + r"pi\.org",
        "python" + "hosted",
    ]
    words += ["index" + "-url", "arti" + "factory"]
    pattern = re.compile("|".join(words))
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found = pattern.search(text)
        assert found is None, f"{where(path)}: {text[max(0, found.start() - 40) : found.end() + 40]!r}"


def named_files(page):
    """Files of the repository that a page names: in backticks, in bold, or as a relative link."""
    text = page.read_text(encoding="utf-8")
    found = set(re.findall(r"[`*\s(|]((?:nanok3|tests|docs|bench|examples)/[\w./-]+\.\w+)", text))
    found |= {link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link}
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=where)
def test_every_file_that_a_page_names_exists(page):
    for name in named_files(page):
        here = (page.parent / name, ROOT / name)
        assert any(path.exists() for path in here), f"{where(page)} names {name}"
