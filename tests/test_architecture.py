"""The house: imports go one way, down; and the marks of the style that can be counted."""
from __future__ import annotations

import ast
import builtins
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchckpt
from tests.scripts import run

PACKAGE = Path(torchckpt.__file__).parent

WITHOUT_TORCH = ("errors", "typing", "version", "planning", "jobs")
ALONE = {("graph", "regions"): ("regions.flags", "regions.wrap.mixin")}
"""All that one may import of the other."""


def read_floors(text: str) -> dict[str, list[list[str]]]:
    """The drawing in CONTRIBUTING.md: of each folder the floors, from the top, and what stands on each."""
    drawing = text.split("```floors\n")[1].split("```")[0]
    lines = (line.split(maxsplit=1) for line in drawing.splitlines())
    return {within(f"{folder}.").strip("."): [floor.split() for floor in floors.split("|")] for folder, floors in lines}


def module_of(path: Path) -> str:
    """Such as ``regions.frame`` or ``regions.__init__``; ``__init__`` for the package's own."""
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
                yield name if name in SOURCES or is_folder(name) else within(base)


def within(name: str) -> str:
    return "__init__" if name == "torchckpt" else name.removeprefix("torchckpt.")


def is_inside(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


FLOORS = read_floors((PACKAGE.parent / "CONTRIBUTING.md").read_text())


def violations(module: str, source: str) -> list[str]:
    """Each import of ``source`` that goes up, sideways, or where it may not."""
    return [f"{module} imports {imported}" for imported in imports(module, source) if not may_import(module, imported)]


def may_import(module: str, imported: str) -> bool:
    home = module.split(".")[0]
    if not is_ours(imported):
        return not (is_inside(imported, "torch") and home in WITHOUT_TORCH)
    if home in WITHOUT_TORCH and imported.split(".")[0] not in WITHOUT_TORCH:
        return False
    alone = ALONE.get((home, imported.split(".")[0]))
    if alone is not None and not any(is_inside(imported, one) for one in alone):
        return False
    target = f"{imported}.__init__" if is_folder(imported) else imported
    folder, upper, lower = parting(module.split("."), target.split("."))
    if upper == lower or folder not in FLOORS:
        return True
    return floor_of(folder, upper) < floor_of(folder, lower)


def is_ours(name: str) -> bool:
    return name.split(".")[0] in {module.split(".")[0] for module in SOURCES}


def is_folder(name: str) -> bool:
    return any(module.startswith(f"{name}.") for module in SOURCES)


def parting(module: list[str], imported: list[str]) -> tuple[str, str, str]:
    """The innermost folder that has both, and which of its items has the one and the other."""
    shared = 0
    while module[shared] == imported[shared] and shared < min(len(module), len(imported)) - 1:
        shared += 1
    return ".".join(module[:shared]), module[shared], imported[shared]


def floor_of(folder: str, item: str) -> int:
    """Counted from the top."""
    return next((at for at, floor in enumerate(FLOORS[folder]) if item in floor), len(FLOORS[folder]))


# the floors -----------------------------------------------------------------------------------------------------------


def items(folder: str) -> set[str]:
    """The files and folders in ``folder``."""
    inside = [module.removeprefix(f"{folder}.") for module in SOURCES if not folder or module.startswith(f"{folder}.")]
    return {module.split(".")[0] for module in inside}


def test_everything_stands_on_one_floor():
    folders = {module.rpartition(".")[0] for module in SOURCES}
    with_folders = {
        folder for folder in folders if any(is_folder(f"{folder}.{item}".strip(".")) for item in items(folder))
    }
    assert with_folders == set(FLOORS)
    for folder, floors in FLOORS.items():
        assert sorted(item for floor in floors for item in floor) == sorted(items(folder)), folder


@pytest.mark.parametrize("folder", sorted({module.rpartition(".")[0] for module in SOURCES} - {""}))
def test_folder_is_drawn_in_its_docstring(folder):
    """A line is four spaces, names, and behind two spaces or more what they are. CONTRIBUTING.md draws the top."""
    source = PACKAGE / folder.replace(".", "/") / "__init__.py"
    text = ast.get_docstring(ast.parse(source.read_text()), clean=False) or ""
    drawn = re.findall(r"^    ([a-z_, ]+?)  +\S", text, re.MULTILINE)
    assert items(folder) - {"__init__"} <= set(", ".join(drawn).split(", "))


def test_folders_have_at_most_a_dozen_files():
    folders = [module.rpartition(".")[0] for module in SOURCES if not module.endswith("__init__")]
    assert {folder: folders.count(folder) for folder in folders if folders.count(folder) > 12} == {}


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_down(module):
    assert violations(module, SOURCES[module]) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("errors", "import torch", ["errors imports torch"]),
        ("typing", "from torch import Tensor", ["typing imports torch"]),
        ("typing", "from torchckpt.version import __version__", ["typing imports version"]),
        ("planning.order.schedule", "from torch.utils import data", ["planning.order.schedule imports torch.utils"]),
        (
            "planning.order.schedule",
            "from torchckpt.regions.flags import flags",
            ["planning.order.schedule imports regions.flags"],
        ),
        ("regions.core.frame", "from torchckpt.pipe import Pipe", ["regions.core.frame imports pipe"]),
        (
            "regions.core.frame",
            "def f():\n    import torchckpt.pipe.run.step",
            ["regions.core.frame imports pipe.run.step"],
        ),
        ("regions.core.frame", "from torchckpt import testing", ["regions.core.frame imports testing"]),
        ("regions.core.frame", "from torchckpt import checkpoint", ["regions.core.frame imports __init__"]),
        ("regions.core.frame", "import torchckpt", ["regions.core.frame imports __init__"]),
        (
            "regions.core.frame",
            "from torchckpt.planning.step import table",
            ["regions.core.frame imports planning.step.table"],
        ),
        ("regions.core.frame", "from ...pipe import Pipe", ["regions.core.frame imports pipe"]),
        ("regions.core.frame", "from ... import testing", ["regions.core.frame imports testing"]),
        ("pipe.run.step", "from torchckpt.distributed import recompute_ahead", ["pipe.run.step imports distributed"]),
        (
            "graph.trace.capture",
            "from torchckpt.regions.core.frame import Frame",
            ["graph.trace.capture imports regions.core.frame"],
        ),
        (
            "graph.trace.capture",
            "from torchckpt.regions import checkpoint_module",
            ["graph.trace.capture imports regions"],
        ),
        ("testing.counts", "from torchckpt.__main__ import main", ["testing.counts imports __main__"]),
        ("pipe.balance", "from torchckpt.command import balance", ["pipe.balance imports command.balance"]),
        ("planning.order.schedule", "import torchckpt.features", ["planning.order.schedule imports features"]),
        ("planning.draw.svg", "from torchckpt.planning.plan import Stage", ["planning.draw.svg imports planning.plan"]),
        ("graph.step.emit", "from torchckpt.graph.run import calls", ["graph.step.emit imports graph.run.calls"]),
    ],
)
def test_import_that_goes_up_is_found(module, source, found):
    assert violations(module, source) == found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__init__", "from torchckpt.pipe import Pipe\nfrom torchckpt import errors, testing"),
        ("testing.counts", "from torchckpt.regions.core.frame import observers"),
        (
            "pipe.run.step",
            "from torchckpt.regions.core.frame import Frame\nfrom torchckpt.pipe.run.pipeline import clock_cycles",
        ),
        (
            "graph.trace.capture",
            "from torchckpt.regions.flags import flags\nfrom torchckpt.regions import flags\nimport torch",
        ),
        ("graph.run.rematerialize", "from torchckpt.regions.wrap.mixin import Mixin"),
        (
            "regions.core.frame",
            "import torch\nfrom torchckpt.errors import Fault\nfrom . import slots\nfrom .. import flags",
        ),
        ("regions.__init__", "from .core.frame import Frame\nfrom torchckpt.regions.core.call import Call"),
        ("planning.order.schedule", "from torchckpt.errors import Fault\nimport dataclasses"),
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


WITHOUT_COMPILER = {
    "a region": (
        "block = torch.nn.Linear(2, 2);"
        "region = torchckpt.Checkpointing(block, torchckpt.checkpoint(block, torch.ones(2, 2)));"
        "region.recompute(region.checkpoint()).sum().backward();"
        "torchckpt.checkpoint_module(block); torchckpt.keep(block, torch.ones(2, 2)).sum().backward()"
    ),
    "a counted step of layers": "torchckpt.checkpoint_layers(model, budget='1GB'); model(x).sum().backward()",
    "a counted backward of a Pipe": "torchckpt.Pipe(model, [2, 2], chunks=2, budget='1GB')(x).sum().backward()",
    "a counted step of a Pipe": (
        "torchckpt.Pipe(model, [2, 2], chunks=2, budget='1GB').step(x, x, loss_fn=torch.nn.functional.mse_loss)"
    ),
    "layers that are timed": "torchckpt.pipe.balance_by_time(2, model, x)",
    "a replay that modes watch": (
        "from torchckpt.measuring.live import Watch; outputs = torchckpt.checkpoint(model, x); watch = Watch();\n"
        "with watch: outputs.sum().backward()"
    ),
}


@pytest.mark.parametrize("what", WITHOUT_COMPILER)
def test_it_imports_no_compiler(what):
    """Dynamo takes seconds to import, which would count for a layer, and where it is there, regions look for compiled
    code."""
    program = (
        "import sys, torch, torchckpt; from torch import nn; x = torch.ones(4, 2);"
        "model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)));"
        f"{WITHOUT_COMPILER[what]}\nprint('torch._dynamo' in sys.modules)"
    )
    done = run("-c", program)
    assert done.stdout.strip() == "False", done.stderr


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
    assert locals_ == ["regions.flags"]
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
    assert statistics.median(lines.values()) < 180


def test_functions_are_at_most_75_lines():
    assert [function for function in FUNCTIONS if function[1] > 75] == []
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
    assert {module.rpartition("private")[0] for module in found} == {"regions.", "distributed.", "graph.", "costs."}
    assert {module for module in found if "private" not in module.split(".")} == set()


def test_no_builtin_exception_is_raised_but_those_of_eager_pytorch_and_of_test_helpers():
    calls = [(module, node.exc) for module, node in nodes(ast.Raise) if isinstance(node.exc, ast.Call)]
    raised = {(module, ast.unparse(call.func)) for module, call in calls if hasattr(builtins, ast.unparse(call.func))}
    # A module's __getattr__ must raise AttributeError: hasattr() asks for it.
    allowed = {
        ("__init__", "AttributeError"),
        ("regions.saved", "RuntimeError"),
        ("regions.state.boundary", "RuntimeError"),
        ("testing.counts", "AssertionError"),
    }
    assert raised <= allowed
