"""The messages of all errors, in one list that can be read in one go: ``messages.txt``, made of the package's source.

``python -m tests.test_messages`` writes it anew.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torchckpt

FILE = Path(__file__).with_name("messages.txt")
PACKAGE = Path(torchckpt.__file__).parent
ERROR = re.compile(r"Fault|Unusable|Infeasible|[A-Z]\w*(Error|Infeasible)")


def messages() -> str:
    """The modules by name, each with the first lines of its messages; a field of an f-string is ``{…}``."""
    parts = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = sorted(set(Module(ast.parse(path.read_text(encoding="utf-8"))).lines()))
        if lines:
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            parts.append("\n".join([name, *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


class Module:
    """The source of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def lines(self) -> Iterator[str]:
        """The first line of each message: of a fault, of an error, and what is passed on as a ``rule``."""
        for call in (node for node in ast.walk(self._tree) if isinstance(node, ast.Call)):
            scopes = self._around(call)
            for argument in self._argument(call):
                for text in self._texts(argument, scopes):
                    line = text.partition("\n")[0].strip()
                    if re.search(r"\w\w", line.replace("{…}", "")):
                        yield line

    def _around(self, node: ast.AST) -> list[ast.AST]:
        """The functions around ``node``, the inner one first, and the module."""
        around = [one for one in self._functions.values() if one.lineno <= node.lineno <= (one.end_lineno or 0)]
        return [*sorted(around, key=lambda one: -one.lineno), self._tree]

    def _argument(self, call: ast.Call) -> list[ast.expr]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if ERROR.fullmatch(name):
            return call.args[:1]
        parameters = [one.arg for one in self._functions[name].args.args] if name in self._functions else []
        place = parameters.index("rule") if "rule" in parameters else len(call.args)
        return call.args[place : place + 1]

    def _texts(self, node: ast.expr, scopes: Sequence[ast.AST]) -> list[str]:
        """What ``node`` may be: a text, or those of a name, of a choice, or of what a function returns or yields."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return self._joined(node.values, scopes)
        if isinstance(node, ast.IfExp):
            return [*self._texts(node.body, scopes), *self._texts(node.orelse, scopes)]
        if isinstance(node, ast.Name):
            return self._texts_of_name(node.id, scopes)
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if name in self._functions:
            function = self._functions[name]
            return [text for value in _results(function) for text in self._texts(value, [function, self._tree])]
        return []

    def _joined(self, parts: Sequence[ast.expr], scopes: Sequence[ast.AST]) -> list[str]:
        """Each text of the ``parts`` of an f-string, of which all fields are ``{…}`` but those named ``rule``."""
        texts = [""]
        for part in parts:
            held = part.value if isinstance(part, ast.FormattedValue) else part
            is_field = not isinstance(held, ast.Constant) and getattr(held, "id", "") not in ("rule", "what")
            ends = ["{…}"] if is_field else self._texts(held, scopes) or ["{…}"]
            texts = [text + end for text in texts for end in ends]
        return texts

    def _texts_of_name(self, name: str, scopes: Sequence[ast.AST]) -> list[str]:
        for scope in scopes:
            values = [value for node in ast.walk(scope) for value in self._values(name, node)]
            if texts := [text for value in values for text in self._texts(value, scopes)]:
                return texts
        return []

    def _values(self, name: str, node: ast.AST) -> Iterator[ast.expr]:
        """What ``node`` gives to ``name``: by assignment, as a default, or as the first of what a loop goes over."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names, values = [target], [node.value]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    names, values = target.elts, node.value.elts
                yield from (value for one, value in zip(names, values) if isinstance(one, ast.Name) and one.id == name)
        elif isinstance(node, ast.arguments):
            pairs = zip(node.args[::-1], node.defaults[::-1])
            yield from (default for argument, default in pairs if argument.arg == name)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            first, called = node.target.elts[0], getattr(getattr(node.iter, "func", None), "id", "")
            rows = _results(self._functions[called]) if called in self._functions else getattr(node.iter, "elts", [])
            if isinstance(first, ast.Name) and first.id == name:
                yield from (row.elts[0] for row in rows if isinstance(row, ast.Tuple))


def _results(function: ast.FunctionDef) -> list[ast.expr]:
    """What ``function`` returns or yields."""
    nodes = (node for node in ast.walk(function) if isinstance(node, (ast.Return, ast.Yield)))
    return [node.value for node in nodes if node.value is not None]


def test_the_list_of_messages_is_that_of_the_package():
    assert FILE.read_text(encoding="utf-8") == messages(), "if it reads well: python -m tests.test_messages"


if __name__ == "__main__":
    FILE.write_text(messages(), encoding="utf-8")
