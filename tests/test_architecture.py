"""The rules of the code base that a program can check: layers, sizes, public names, what an import pulls in.

Each check takes sources and returns the violations in words, so that a companion test can show that it finds a bad one.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import pallas_flash

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 80, 8

# An import points at the same or a lower layer. The longest prefix of a module's name decides.
LAYERS = {
    "pallas_flash.spec": 0,
    "pallas_flash.elementwise": 0,
    "pallas_flash.combine": 0,
    "pallas_flash.command_line": 0,
    "pallas_flash.decode_spec": 0,
    "pallas_flash.masks": 1,
    "pallas_flash.rotary": 1,
    "pallas_flash.scores": 1,
    "pallas_flash.checks": 1,
    "pallas_flash.validation": 1,
    "pallas_flash.decode_validation": 1,
    "pallas_flash.tuning": 1,
    "pallas_flash.tile_ranges": 2,
    "pallas_flash.dropout": 1,
    "pallas_flash.products": 2,
    "pallas_flash.xla": 2,
    "pallas_flash.xla_decode": 2,
    "pallas_flash.reference": 2,
    "pallas_flash.splits": 1,
    "pallas_flash.passes": 2,
    "pallas_flash.partitioning": 2,
    "pallas_flash.kernels": 2,
    "pallas_flash.kernels.sm80": 3,
    "pallas_flash.kernels.sm90": 3,
    "pallas_flash.autodiff": 4,
    "pallas_flash.dispatch": 5,
    "pallas_flash.api": 6,
    "pallas_flash.cache": 6,
    "pallas_flash.decode": 6,
    "pallas_flash": 7,  # __init__; a module that is not listed lands here too, and `unlisted` names it
    "pallas_flash.flax": 7,
    "pallas_flash.distributed": 7,
    "pallas_flash.benchmarks": 7,
    "pallas_flash.tuning.search": 7,
    "pallas_flash.tuning.kernels": 7,
    "pallas_flash.tuning.__main__": 7,
    "models": 8,
    "demo": 9,
    "train_demo": 10,
}

# Functions whose parameters are an interface: the operators, generation, and the adaptor, whose signature is Flax's.
MANY_PARAMETERS = {
    "pallas_flash.api.flash_attention",
    "pallas_flash.decode.flash_decode",
    "pallas_flash.decode.paged_flash_decode",
    "pallas_flash.flax.attention_fn",
    "models.generate.generate",
}

# Where Pallas has no public way: an operation of its own that says where a barrier stands.
MAY_USE_PRIVATE_JAX = {"pallas_flash.kernels.tma"}

PUBLIC_NAMES = (
    "Cache",
    "Rotary",
    "append_to_cache",
    "append_to_pages",
    "apply_rotary",
    "combine",
    "explain",
    "explain_decode",
    "flash_attention",
    "flash_decode",
    "masks",
    "paged_flash_decode",
    "quantise",
    "reference_attention",
)
NOT_IMPORTED_BY_CORE = ("flax", "optax", "jax.experimental.pallas", "models", "demo")


class Source(NamedTuple):
    module: str  # dotted name
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def project_sources() -> list[Source]:
    paths = [path for folder in ("pallas_flash", "models", "demo") for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += [path for path in [ROOT / "train_demo.py"] if path.exists()]
    return [Source(module_name(path.relative_to(ROOT)), path.read_text()) for path in paths]


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def core(sources: list[Source]) -> list[Source]:
    return [source for source in sources if source.module.split(".")[0] == "pallas_flash"]


def prefix(module: str) -> str | None:
    """The entry of LAYERS that a module falls under."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in LAYERS), None)


def imports(source: Source, modules: set[str]) -> Iterator[str]:
    """The modules that a source names in imports, wherever they stand in it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.module}: relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else str(node.module)


def unlisted(sources: list[Source]) -> list[str]:
    """Modules of the core that no layer was named for."""
    return [s.module for s in sources if s.module != "pallas_flash" and prefix(s.module) in (None, "pallas_flash")]


def upward_imports(sources: list[Source]) -> list[str]:
    modules = {source.module for source in sources} | set(LAYERS)
    found = []
    for source in sources:
        for target in imports(source, modules):
            here, there = prefix(source.module), prefix(target)
            if here and there and LAYERS[there] > LAYERS[here]:
                found.append(f"{source.module} (layer {LAYERS[here]}) imports {target} (layer {LAYERS[there]})")
    return found


def sibling_kernel_imports(sources: list[Source]) -> list[str]:
    generations = ("pallas_flash.kernels.sm80", "pallas_flash.kernels.sm90")
    modules = {source.module for source in sources} | set(LAYERS)
    return [
        f"{source.module} imports {target}"
        for source in sources
        for target in imports(source, modules)
        if {prefix(source.module), prefix(target)} == set(generations)
    ]


def functions(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = f"{scope}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions(child, name)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from `def` on, its docstring aside."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def oversized(sources: list[Source]) -> list[str]:
    found = []
    for source in sources:
        if (lines := len(source.text.splitlines())) > MAX_FILE_LINES:
            found.append(f"{source.module}: {lines} lines")
        for name, function in functions(source.tree, source.module):
            if (lines := code_lines(function)) > MAX_FUNCTION_LINES:
                found.append(f"{name}: {lines} lines")
    return found


def overloaded(sources: list[Source]) -> list[str]:
    """Functions with more parameters than a reader can hold: a call's facts belong in AttentionSpec and Operands."""
    found = []
    for source in sources:
        for name, function in functions(source.tree, source.module):
            args = function.args
            count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
            if count > MAX_PARAMETERS and name not in MANY_PARAMETERS:
                found.append(f"{name}: {count} parameters")
    return found


def private_jax(sources: list[Source]) -> list[str]:
    private = re.compile(r"\bjax\._src\b|\bjaxlib\._|\bfrom jax import _src\b")
    public = (s for s in sources if s.module not in MAY_USE_PRIVATE_JAX)
    return [f"{s.module}: {match.group()}" for s in public for match in private.finditer(s.text)]


def environment_reads(sources: list[Source]) -> list[str]:
    names = ("environ", "environb", "getenv", "getenvb")
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            imported = isinstance(node, ast.ImportFrom) and node.module == "os" and [a.name for a in node.names]
            if (isinstance(node, ast.Attribute) and node.attr in names) or (imported and set(imported) & set(names)):
                found.append(f"{source.module}:{node.lineno} reads the environment")
    return found


def global_state(sources: list[Source]) -> list[str]:
    """`global` statements, and lists, sets and dicts at module level that are not named as CONSTANTS."""
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    found = []
    for source in sources:
        tree = source.tree
        found += [f"{source.module}:{n.lineno} global" for n in ast.walk(tree) if isinstance(n, ast.Global)]
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, displays):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                found += [f"{source.module}.{name}" for name in names if name != "__all__" and not name.isupper()]
    return found


def unfinished(sources: list[Source]) -> list[str]:
    return [f"{s.module}: {m.group()}" for s in sources for m in re.finditer(r"\b(TODO|FIXME|XXX|HACK)\b", s.text)]


def loaded_after(statement: str, names: tuple[str, ...]) -> list[str]:
    """Which of these modules a fresh interpreter has loaded after a statement."""
    program = f"import sys; {statement}; print(*(n for n in {names!r} if n in sys.modules))"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()


CHECKS = (
    unlisted,
    upward_imports,
    sibling_kernel_imports,
    oversized,
    overloaded,
    private_jax,
    environment_reads,
    global_state,
    unfinished,
)
CORE_ONLY = (unlisted, environment_reads, global_state)


@pytest.mark.case("K07")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_project(check):
    sources = project_sources()
    assert check(core(sources) if check in CORE_ONLY else sources) == []


def test_sources_are_found():
    modules = {source.module for source in project_sources()}
    assert {"pallas_flash", "pallas_flash.spec", "models.transformer", "train_demo"} <= modules


def test_public_names():
    public = {
        name
        for name, value in vars(pallas_flash).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert sorted(pallas_flash.__all__) == list(PUBLIC_NAMES)
    assert public == set(PUBLIC_NAMES) - {"masks"}
    assert pallas_flash.masks is importlib.import_module("pallas_flash.masks")


def test_import_is_light():
    assert loaded_after("import pallas_flash", NOT_IMPORTED_BY_CORE) == []


def test_import_check_finds_a_heavy_import():
    assert loaded_after("import pallas_flash, jax.experimental.pallas", NOT_IMPORTED_BY_CORE) == [
        "jax.experimental.pallas"
    ]


BAD_SOURCES = {
    unlisted: ("pallas_flash.helpers", "x = 1"),
    upward_imports: ("pallas_flash.masks", "def f():\n    from pallas_flash import xla"),
    sibling_kernel_imports: ("pallas_flash.kernels.sm90.forward", "import pallas_flash.kernels.sm80.config"),
    oversized: ("pallas_flash.xla", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    overloaded: ("pallas_flash.xla", "def f(a, b, c, d, e, f, g, h, *, i): ..."),
    private_jax: ("models.attention", "from jax._src import core"),
    environment_reads: ("pallas_flash.dispatch", "import os\nfast = os.environ.get('FAST')"),
    global_state: ("pallas_flash.dispatch", "_cache: dict[str, int] = {}"),
    unfinished: ("models.generate", "# TODO: beam search"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_finds_a_bad_source(check):
    assert len(check([Source(*BAD_SOURCES[check])])) == 1


@pytest.mark.parametrize(
    ("check", "module", "text"),
    [
        (upward_imports, "pallas_flash.spec", "import pallas_flash"),
        (upward_imports, "pallas_flash.tuning.cache", "from pallas_flash.tuning.search import measure"),
        (upward_imports, "pallas_flash.flax", "import models.layers"),
        (upward_imports, "models.layers", "from demo import tasks"),
        (oversized, "pallas_flash.xla", "x = 1\n" * (MAX_FILE_LINES + 1)),
        (oversized, "demo.report", "class A:\n    def f(self):\n" + "        x = 1\n" * MAX_FUNCTION_LINES),
        (environment_reads, "pallas_flash.xla", "from os import getenv"),
        (global_state, "pallas_flash.xla", "def f():\n    global count\n    count = 1"),
    ],
)
def test_check_finds_other_bad_sources(check, module, text):
    assert len(check([Source(module, text)])) == 1


def test_checks_accept_what_is_allowed():
    docstring = '    """' + "line\n" * MAX_FUNCTION_LINES + '    """\n'
    allowed = [
        Source("pallas_flash.xla", "from pallas_flash import masks\nfrom pallas_flash.spec import Array"),
        Source("pallas_flash.kernels.sm80.forward", "from pallas_flash.kernels import softmax\n"),
        Source("pallas_flash.api", "def flash_attention(a, b, c, d, e, f, g, h, i):\n" + docstring + "    return a"),
        Source("models.config", "PRESETS = {}"),
    ]
    assert [check(allowed) for check in CHECKS] == [[] for _ in CHECKS]
