"""A hook of MkDocs: pages that are made from files beside ``docs/``, so that there is one copy of each text."""
from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BENCHMARKS = ("graph", "layers", "offload", "overhead", "peers", "pipe", "pipeline", "simulator")
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "website/planner/planner.html": "planner.html",
    **{f"benchmarks/{name}/README.md": f"measured/{name}.md" for name in BENCHMARKS},
}
"""A file of the repository, and the page that it becomes."""

_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_ALL = re.compile(r"^::: ([\w.]+)\.\*((?: \w+)*)$", flags=re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", flags=re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of ``docs/recipes`` into the menu."""
    recipes = [f"recipes/{path.name}" for path in sorted(Path(config.docs_dir, "recipes").glob("*.md"))]
    recipes.sort(key=lambda name: name != "recipes/index.md")
    for entry in config.nav or []:
        if "Recipes" in entry:
            entry["Recipes"] = recipes
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files of the repository, and those files that any page links to."""
    for source, place in places().items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, place, content=_page(source)))
    return files


@cache
def places() -> dict[str, str]:
    """Where in the site a file of the repository stands: pages of ``docs/``, ``PAGES``, and all that these link to."""
    own = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.*")]
    made = {**{f"docs/{name}": name for name in own}, **PAGES}
    unread = [source for source in made if source.endswith(".md")]
    while unread:
        for source in linked_from(unread.pop()):
            if source not in made:
                made[source] = f"source/{source}" + ("" if source.endswith((".md", ".svg")) else ".md")
                unread += [source] * source.endswith(".md")
    return made


def linked_from(source: str) -> list[str]:
    """The files of the repository that the page ``source`` links to."""
    targets = [_target(source, found[2]) for found in _LINK.finditer((ROOT / source).read_text())]
    return [target for target in targets if (ROOT / target).is_file()]


def _target(source: str, link: str) -> str:
    return normpath(f"{PurePosixPath(source).parent}/{link}")


def _page(source: str) -> str | bytes:
    """A page that shows the file ``source``; search does not look into code."""
    path = ROOT / source
    if path.suffix == ".svg":
        return path.read_bytes()
    if path.suffix == ".md":
        return path.read_text()
    return f"---\nsearch: {{exclude: true}}\n---\n# {source}\n\n~~~~{path.suffix[1:]}\n{path.read_text()}\n~~~~\n"


def linked(text: str, source: str) -> str:
    """``text`` of the file ``source``, whose links to files of the repository become links to their pages."""
    folder = PurePosixPath(places()[source]).parent

    def in_site(found: re.Match[str]) -> str:
        place = places().get(_target(source, found[2]))
        return f"{found[1]}{relpath(place, folder)}{found[3]}" if place else found[0]

    return _LINK.sub(in_site, text)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to pages of the site; name by name what ``::: torchckpt.graph.* frontier`` stands for. No comment stays."""
    source = next(source for source, place in places().items() if place == page.file.src_uri)
    markdown = linked(markdown, source)
    return _COMMENT.sub("", _ALL.sub(lambda found: directives(found[1], found[2].split()), markdown))


def directives(module: str, first: list[str]) -> str:
    """What is public in ``module``: the names in ``first``, then what is called, then classes and constants."""
    homes = public(module)
    if unknown := [name for name in first if f"{module}.{name}" not in homes]:
        raise ValueError(f"{module} has no public {', '.join(unknown)}")

    def place(name: str) -> tuple[int, bool]:
        label = name.rpartition(".")[2]
        return first.index(label) if label in first else len(first), label[0].isupper()

    return "\n".join(directive(name, homes[name]) for name in sorted(homes, key=place))


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
    """``torchckpt.checkpoint`` is made in ``torchckpt.regions.core.checkpointing``: follow what packages import."""
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
