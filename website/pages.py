"""A hook of MkDocs: pages that are made from files beside ``docs/``, so that there is one copy of each text."""
from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BENCHMARKS = ("graph", "overhead", "pipe", "pipeline", "simulator")
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{f"benchmarks/{name}/README.md": f"measured/{name}.md" for name in BENCHMARKS},
}
"""A file of the repository, and the page that it becomes."""

_LINK = re.compile(r"(!?)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_ALL = re.compile(r"^::: ([\w.]+)\.\*$", flags=re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", flags=re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.svg)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of ``docs/recipes`` into the menu."""
    recipes = [f"recipes/{path.name}" for path in sorted(Path(config.docs_dir, "recipes").glob("*.md"))]
    recipes.sort(key=lambda name: name != "recipes/index.md")
    for entry in config.nav or []:
        if "Recipes" in entry:
            entry["Recipes"] = recipes
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files of the repository, and their pictures."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        for picture in _PICTURE.findall(text):
            place = str(PurePosixPath(page).parent / picture)
            content = (ROOT / source).parent.joinpath(picture).read_bytes()
            files.append(File.generated(config, place, content=content))
        files.append(File.generated(config, page, content=linked(text, source, str(config.repo_url))))
    return files


def linked(text: str, source: str, repository: str) -> str:
    """``text`` of the file ``source``, with links to other files of the repository as addresses."""
    folder = PurePosixPath(source).parent

    def absolute(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target or target.endswith(".svg"):
            return found[0]
        place = normpath(str(folder / target))
        kind = "tree" if (ROOT / place).is_dir() else "blob"
        return f"{found[1]}]({repository.rstrip('/')}/{kind}/main/{place}{found[3] or ''})"

    return _LINK.sub(absolute, text)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Name by name what a line such as ``::: torchckpt.graph.*`` stands for. Comments are for the tests: none stay."""
    named = _ALL.sub(lambda found: "\n".join(directive(*pair) for pair in public(found[1]).items()), markdown)
    return _COMMENT.sub("", named)


def directive(name: str, home: str) -> str:
    """What mkdocstrings reads for ``name``, which is made in ``home``: a function may have its module's name."""
    label = name.rpartition(".")[2]
    return f"::: {home}\n    options:\n      heading: {name}\n      toc_label: {label}\n"


def public(module: str) -> dict[str, str]:
    """The names in the ``__all__`` of ``module``, and where each is made; modules have pages of their own."""
    source = _source(module)
    homes = {name: f"{module}.{name}" for name in _listed(source)}
    for statement in ast.walk(source):
        if isinstance(statement, ast.ImportFrom):
            homes |= {alias.name: _home(f"{statement.module}.{alias.name}") for alias in statement.names}
    named = {name: homes[name] for name in _listed(source) if name != "__version__"}
    return {f"{module}.{name}": home for name, home in named.items() if not _is_elsewhere(module, home)}


def _is_elsewhere(module: str, home: str) -> bool:
    """Whether a name of ``torchckpt`` itself has its place on another page."""
    return _is_module(home) or (module == "torchckpt" and home.startswith(("torchckpt.errors.", "torchckpt.pipe.")))


def _home(path: str) -> str:
    """``torchckpt.checkpoint`` is made in ``torchckpt.kernel.region.checkpointing``: follow what packages import."""
    module, _, name = path.rpartition(".")
    if _is_module(path) or not module.startswith("torchckpt") or not (_path(module) / "__init__.py").exists():
        return path
    for statement in ast.walk(_source(module)):
        if isinstance(statement, ast.ImportFrom) and name in [alias.name for alias in statement.names]:
            return _home(f"{statement.module}.{name}")
    return path


def _listed(source: ast.Module) -> list[str]:
    for statement in source.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise ValueError("a module on an API page has __all__")


def _path(module: str) -> Path:
    return ROOT.joinpath(*module.split("."))


def _source(module: str) -> ast.Module:
    path = _path(module)
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _is_module(path: str) -> bool:
    """Whether ``path`` is a module, and not something in a package that has the name of a module there."""
    return path in ("torchckpt.errors", "torchckpt.graph", "torchckpt.testing", "torchckpt.pipe.skip")
