"""The house: imports go one way, down; and the marks of the style that can be counted."""
from __future__ import annotations

import ast
import builtins
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchckpt

PACKAGE = Path(torchckpt.__file__).parent

GROUND = ("errors", "typing", "version")
SHARED = ("modules", "tensors")
"""What of torch several parts ask."""
MAY_IMPORT = {
    # floor 5: all below
    "__init__": (*GROUND, *SHARED, "model", "kernel", "pipe", "distributed", "graph", "plan", "testing"),
    "__main__": (*GROUND, "command"),
    "command": (*GROUND, *SHARED, "model", "kernel", "pipe", "distributed", "graph", "plan"),
    "testing": (*GROUND, *SHARED, "model", "kernel", "pipe", "distributed", "graph", "plan"),
    # floor 4
    "pipe": (*GROUND, *SHARED, "model", "kernel"),
    "distributed": (*GROUND, *SHARED, "features", "model", "kernel"),
    "plan": (*GROUND, *SHARED, "model", "kernel"),
    "graph": (*GROUND, *SHARED, "features", "model", "kernel.flags", "kernel.mixin"),
    # floor 3
    "kernel": (*GROUND, *SHARED, "features"),
    # floor 2
    "model": GROUND,
    "features": GROUND,
    **dict.fromkeys(SHARED, GROUND),
    # floor 1
    **dict.fromkeys(GROUND, ()),
}
"""A file or folder of the package, and those that it may import, besides itself."""

WITHOUT_TORCH = (*GROUND, "model")


def module_of(path: Path) -> str:
    """Such as ``kernel.frame`` or ``kernel.__init__``; ``__init__`` for the package's own."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


SOURCES = {module_of(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str, source: str) -> Iterator[str]:
    """The modules that ``source`` imports, anywhere in it; of the package's own without its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (within(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = ["torchckpt", *module.split(".")[: -node.level]] if node.level else []
            base = ".".join([*folder, *filter(None, [node.module])])
            for alias in node.names:
                name = within(f"{base}.{alias.name}")
                yield name if name in SOURCES or name in MAY_IMPORT else within(base)


def within(name: str) -> str:
    return "__init__" if name == "torchckpt" else name.removeprefix("torchckpt.")


def is_inside(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def violations(module: str, source: str) -> list[str]:
    """Each import of ``source`` that goes up, or sideways into another folder."""
    home = module.split(".")[0]
    if home not in MAY_IMPORT:
        return [f"{module} stands on no floor"]
    found = []
    for imported in imports(module, source):
        if imported.split(".")[0] in MAY_IMPORT:
            if not any(is_inside(imported, allowed) for allowed in (home, *MAY_IMPORT[home])):
                found.append(f"{module} imports {imported}")
        elif is_inside(imported, "torch") and home in WITHOUT_TORCH:
            found.append(f"{module} imports {imported}")
    return found


# the floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_down(module):
    assert violations(module, SOURCES[module]) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("errors", "import torch", ["errors imports torch"]),
        ("typing", "from torch import Tensor", ["typing imports torch"]),
        ("errors", "from torchckpt.typing import Function", ["errors imports typing"]),
        ("model.schedule", "from torch.utils import data", ["model.schedule imports torch.utils"]),
        ("model.schedule", "from torchckpt.kernel.flags import flags", ["model.schedule imports kernel.flags"]),
        ("kernel.frame", "from torchckpt.pipe import Pipe", ["kernel.frame imports pipe"]),
        ("kernel.frame", "def f():\n    import torchckpt.pipe.lane", ["kernel.frame imports pipe.lane"]),
        ("kernel.frame", "from torchckpt import testing", ["kernel.frame imports testing"]),
        ("kernel.frame", "from torchckpt import checkpoint", ["kernel.frame imports __init__"]),
        ("kernel.frame", "import torchckpt", ["kernel.frame imports __init__"]),
        ("kernel.frame", "from torchckpt.model import simulator", ["kernel.frame imports model.simulator"]),
        ("kernel.frame", "from ..pipe import Pipe", ["kernel.frame imports pipe"]),
        ("kernel.frame", "from .. import testing", ["kernel.frame imports testing"]),
        ("pipe.lane", "from torchckpt.distributed import recompute_ahead", ["pipe.lane imports distributed"]),
        ("graph.trace", "from torchckpt.kernel.frame import Frame", ["graph.trace imports kernel.frame"]),
        ("graph.trace", "from torchckpt.kernel import checkpoint_module", ["graph.trace imports kernel"]),
        ("testing", "from torchckpt.__main__ import main", ["testing imports __main__"]),
        ("pipe.balance", "from torchckpt.command import balance", ["pipe.balance imports command.balance"]),
        ("attic.old", "", ["attic.old stands on no floor"]),
    ],
)
def test_import_that_goes_up_is_found(module, source, found):
    assert violations(module, source) == found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__init__", "from torchckpt.pipe import Pipe\nfrom torchckpt import errors, testing"),
        ("testing", "from torchckpt.kernel.frame import observers"),
        ("pipe.lane", "from torchckpt.kernel.frame import Frame\nfrom torchckpt.pipe.clock import clock_cycles"),
        ("graph.trace", "from torchckpt.kernel.flags import flags\nfrom torchckpt.kernel import flags\nimport torch"),
        ("graph.in_place", "from torchckpt.kernel.mixin import Mixin"),
        ("kernel.frame", "import torch\nfrom torchckpt.errors import Fault\nfrom . import flags, slots"),
        ("kernel.__init__", "from .frame import Frame\nfrom torchckpt.kernel.call import Call"),
        ("model.schedule", "from torchckpt.errors import Fault\nimport dataclasses"),
    ],
)
def test_import_that_goes_down_is_none(module, source):
    assert violations(module, source) == []


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or not, each circle once."""
    reached = {module: _reached(module, imported) for module in imported}
    found = {tuple(sorted(other for other in reached[one] if one in reached[other])) for one in imported}
    return sorted([*circle] for circle in found if circle)


def _reached(start: str, imported: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    stack = [start]
    while stack:
        new = imported[stack.pop()] - reached
        reached |= new
        stack.extend(new)
    return reached


def test_no_modules_import_each_other():
    """Also for types alone, and inside of functions. A name that a package exports counts as its module's own."""
    modules = {module.removesuffix(".__init__"): module for module in SOURCES}
    imported = {
        name: {found.removesuffix(".__init__") for found in imports(module, SOURCES[module])} & set(modules) - {name}
        for name, module in modules.items()
    }
    assert circles(imported) == []


@pytest.mark.parametrize(
    ("imported", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_circle_is_found(imported, found):
    assert circles(imported) == found


# what an import costs -------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_that_torch_has_not_imported():
    program = (
        "import sys, torch; before = set(sys.modules); import torchckpt;"
        "print(*sorted(name for name in set(sys.modules) - before if name.split('.')[0] != 'torchckpt'))"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert made.stdout.split() == []


def test_importing_the_version_does_not_import_torch():
    program = "import runpy, sys; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    path = str(PACKAGE / "version.py")
    made = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True, timeout=60)
    assert made.stdout.strip() == "False"


# the marks of the style -----------------------------------------------------------------------------------------------

TREES = {module: ast.parse(source) for module, source in SOURCES.items()}
FUNCTIONS = [
    (f"{module}.{node.name}", node.end_lineno - node.lineno + 1)
    for module, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
]


def nodes(*kinds: type[ast.AST]) -> list[tuple[str, ast.AST]]:
    return [(module, node) for module, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kinds)]


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(target) for target in targets] == ["__all__"]:
                return ast.literal_eval(node.value)
    return None


def bound(tree: ast.Module) -> set[str]:
    """The names that the top level of a module binds, in ``try`` and ``if`` as well."""
    names: set[str] = set()
    stack: list[ast.stmt] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, (ast.Try, ast.If)):
            stack.extend(node.body)
    return names


def test_there_is_no_global_statement():
    assert [module for module, _ in nodes(ast.Global)] == []


def test_there_is_at_most_one_thread_local():
    locals_ = [module for module, node in nodes(ast.Attribute) if ast.unparse(node) == "threading.local"]
    imported = [(module, node) for module, node in nodes(ast.ImportFrom) if node.module == "threading"]
    named = [module for module, node in imported for alias in node.names if alias.name == "local"]
    assert locals_ == ["kernel.flags"]
    assert named == []


def test_there_are_at_most_five_asserts():
    assert len(nodes(ast.Assert)) <= 5


@pytest.mark.parametrize("module", TREES)
def test_module_opens_with_a_docstring_and_says_what_it_exports(module):
    docstring, names = ast.get_docstring(TREES[module]), exported(TREES[module])
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))
    if module != "version":
        assert names is not None, "no __all__"
        assert set(names) <= bound(TREES[module])
        assert len(set(names)) == len(names)


def test_files_are_at_most_400_lines():
    lines = {module: len(source.splitlines()) for module, source in SOURCES.items()}
    assert {module: number for module, number in lines.items() if number > 400} == {}
    assert statistics.median(lines.values()) < 150


def test_functions_are_at_most_100_lines():
    assert [function for function in FUNCTIONS if function[1] > 100] == []
    assert statistics.median(lines for _, lines in FUNCTIONS) <= 10


def private_names(tree: ast.Module) -> Iterator[str]:
    """Of torch's modules, imported or named; ``torch.utils._pytree`` is private by its name only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_inside(node.module or "", "torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_") and name != "_pytree")
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            yield from (name for name in [node.attr] if name.startswith("_") and not name.endswith("__"))


def test_private_names_of_torch_are_imported_in_one_place():
    found = {module for module, tree in TREES.items() if list(private_names(tree))}
    assert {module.rpartition("private")[0] for module in found} == {"kernel.", "distributed.", "graph.", "plan."}
    assert {module for module in found if "private" not in module.split(".")} == set()


def test_no_builtin_exception_is_raised_but_those_of_eager_pytorch_and_of_test_helpers():
    calls = [(module, node.exc) for module, node in nodes(ast.Raise) if isinstance(node.exc, ast.Call)]
    raised = {(module, ast.unparse(call.func)) for module, call in calls if hasattr(builtins, ast.unparse(call.func))}
    # A module's __getattr__ must raise AttributeError: hasattr() asks for it.
    allowed = {("__init__", "AttributeError"), ("kernel.boundary", "RuntimeError"), ("testing", "AssertionError")}
    assert raised <= allowed
