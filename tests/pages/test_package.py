"""The wheel and the source archive: they build, an index takes them, and they install into an empty environment."""
from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import typing_extensions

import torchckpt
from tests.slow import slow

ROOT = Path(__file__).parents[2]
NEVER = ("__pycache__", ".venv", ".git")
"""Folders of a working tree that are no part of the source."""


def run(*command: str | Path, cwd: Path) -> str:
    made = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return made.stdout


def sources(folder: Path) -> Path:
    """A copy of what the repository tracks or would track, in ``folder``: a build leaves files beside its sources."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the files of the repository, from git")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the two files of ``python -m build``: the archive, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("package")
    source = sources(folder / "source")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source, cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_two_files_with_the_version_in_their_names(built: Path) -> None:
    version = torchckpt.__version__
    assert sorted(path.name for path in built.iterdir()) == [
        f"torchckpt-{version}-py3-none-any.whl",
        f"torchckpt-{version}.tar.gz",
    ]


def test_an_index_would_take_and_show_them(built: Path) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    assert said.count("PASSED") == 2


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"torchckpt", f"torchckpt-{torchckpt.__version__}.dist-info"}
    package = Path(torchckpt.__file__).parent
    files = {f"torchckpt/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    data = {"torchckpt/py.typed", "torchckpt/planning/devices.json"}
    data |= {f"torchckpt/jobs/{name}.json" for name in ("models", "transformers")}
    assert {name for name in names if name.startswith("torchckpt/")} == files | data


def test_every_link_of_the_long_description_is_an_address(wheel: Path) -> None:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    head, _, text = zipfile.ZipFile(wheel).read(name).decode().partition("\n\n")
    (home,) = re.findall(r"^Project-URL: Source, (.*)$", head, flags=re.MULTILINE)
    assert "Description-Content-Type: text/markdown" in head
    targets = re.findall(r"\]\(([^)]+)\)", text)
    ours = [target.removeprefix(home) for target in targets if target.startswith(home)]
    assert [target for target in targets if not target.startswith("https://")] == []
    files = [re.sub(r"^/(blob|raw|tree)/main/|#.*", "", target) for target in ours]
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_archive_has_what_the_tests_and_the_site_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt"]
    wanted += ["setup.py", "docs/cost.svg", "SECURITY.md", ".github/workflows/test.yml"]
    wanted += ["mkdocs.yml", "docs/index.md", "examples/train_gpt.py", "benchmarks/overhead/README.md"]
    wanted += ["tests/pages/test_package.py", "tests/device/source/module.cpp", "website/pages.py"]
    assert [name for name in wanted if name not in names] == []
    assert [name for name in names if any(part in NEVER for part in name.split("/"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", *slow(["*.tar.gz"])])  # the wheel is made from the archive
def test_it_installs_into_an_empty_environment(built: Path, kind: str, tmp_path: Path) -> None:
    (file,) = built.glob(kind)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path, cwd=tmp_path)
    python = tmp_path / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    alone = ("--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "install", "-q", *alone, "--target", site, file, cwd=tmp_path)
    shutil.copy(typing_extensions.__file__, site)  # all that the command needs beside Python; torch is not there
    program = (
        "import torchckpt.version, importlib.metadata as data\n"
        "print(torchckpt.version.__version__, data.version('torchckpt'), torchckpt.__file__)\n"
    )
    first, second, place = run(python, "-I", "-c", program, cwd=tmp_path).split()
    assert first == second == torchckpt.__version__
    assert place.startswith(site)
    options = ("--schedule", "1f1b", "--stages", "2", "--microbatches", "4")
    simulated = run(python, "-I", "-m", "torchckpt", "simulate", *options, cwd=tmp_path)
    assert "bound" in simulated
    environment = run(python, "-I", "-m", "torchckpt", "env", cwd=tmp_path)
    assert environment.startswith(f"torchckpt  {first}, in {site}")


def test_citation_names_this_version_and_the_fields_that_the_format_requires() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([a-z-]+): *(.*)$", text, flags=re.MULTILINE))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == torchckpt.__version__
    assert {"message", "title", "authors"} <= set(fields)


def test_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == torchckpt.__version__
