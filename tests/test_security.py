"""What is read is data: the package unpickles nothing, and evaluates no text."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchckpt

PACKAGE = Path(torchckpt.__file__).parent
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("torch.jit", "load"), ("torch.export", "load")}
OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list"}
"""Collectives of torch that pickle."""


def found(source: str) -> Iterator[str]:
    """What in ``source`` could run what is read."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if MODULES & set(name.split(".")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            yield node.func.id
        if isinstance(node, ast.Attribute):
            is_one = node.attr in OBJECTS or (ast.unparse(node.value), node.attr) in ATTRIBUTES
            yield from [ast.unparse(node)] * is_one


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_of_the_package_runs_what_it_reads(path):
    assert list(found(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", ["pickle"]),
        ("def f():\n    from pickle import loads", ["pickle", "pickle.loads"]),
        ("from torch.multiprocessing import reductions, pickle", ["torch.multiprocessing.pickle"]),
        ("eval(text)", ["eval"]),
        ("model.eval(); re.compile(text); torch.compile(model)", []),
        ("torch.load(path)", ["torch.load"]),
        ("dist.all_gather_object(found, mine)", ["dist.all_gather_object"]),
    ],
)
def test_what_would_run_it_is_found(source, expected):
    assert list(found(source)) == expected
