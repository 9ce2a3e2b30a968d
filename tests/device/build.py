"""The device's library: built for the installed torch on first use, and found in a cache folder after that."""
from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.device.errors import BuildError, NoCompilerError, NotSupportedError

__all__ = ["MODULE", "cache_folder", "check_supported", "find_compiler", "library"]

MODULE = "torchckpt_sim"
SOURCE = Path(__file__).parent / "source"
OLDEST, NEWEST = (2, 11), (2, 15)
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", f"-DTORCH_EXTENSION_NAME={MODULE}")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
_SHOWN_LINES = 12


def check_supported(version: str = torch.__version__) -> None:
    """Raise for a torch that the source was not written for."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST, NEWEST))
        raise NotSupportedError(
            f"the simulated device is written for torch {oldest} to {newest}, and this is torch {version}: "
            f"pip install 'torch=={newest}.*'; or widen OLDEST and NEWEST in tests/device/build.py and run "
            "pytest tests/device, which says what has changed"
        )


def find_compiler() -> str:
    """The path of the compiler: ``$CXX``, or the first of g++, clang++ and c++ that is there.

    Raises:
        NoCompilerError: none is, or none that could build this.
    """
    if sys.platform != "linux":
        raise NoCompilerError(f"the simulated device is built on Linux, and this is {sys.platform}: use a container")
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path:
            return path
    where = f"CXX={asked} is no program" if asked else "there is no g++, clang++ or c++"
    raise NoCompilerError(f"the simulated device needs a C++ compiler, and {where}: apt-get install g++, or set CXX")


def library() -> Path:
    """The path of the built library. Builds it if the cache has none for this torch, Python, compiler and source.

    Raises:
        NotSupportedError, NoCompilerError, BuildError: as they say.
    """
    check_supported()
    compiler = find_compiler()
    built = cache_folder() / f"{torch.__version__}-{_key(compiler)}.so"
    if not built.exists():
        with _locked(built.with_suffix(".lock")):
            if not built.exists():  # another process may have built it meanwhile
                _build(compiler, built)
    return built


def cache_folder() -> Path:
    """``$TORCHCKPT_CACHE``, or a folder among the user's caches."""
    asked = os.environ.get("TORCHCKPT_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(asked) if asked else Path(caches) / "torchckpt" / "sim"


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in _files():
        digest.update(f"{path.relative_to(SOURCE)}\n".encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (version, *FLAGS, *LIBRARIES, sysconfig.get_config_var("SOABI"), torch.version.git_version):
        digest.update(str(part).encode())
    return digest.hexdigest()[:16]


def _files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*") if path.suffix in (".h", ".cpp"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # there is none on Windows, where these tests are skipped

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        rule = "the simulated device is built into a folder that can be written"
        raise BuildError(f"{rule}, and {path.parent} is none ({error.strerror}): set TORCHCKPT_CACHE to one") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, target: Path) -> None:
    print(f"sim: building the simulated device for torch {torch.__version__}, once; about a minute", file=sys.stderr)
    scratch = target.with_suffix("")
    scratch.mkdir(exist_ok=True)  # it stays where the build fails, for the command that failed
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda unit: _compile(compiler, unit, scratch), _units(scratch)))
    linked = scratch / target.name
    libraries = Path(torch.__file__).parent / "lib"
    where = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    _run([compiler, "-shared", "-o", str(linked), *map(str, objects), *where, *LIBRARIES])
    linked.replace(target)
    shutil.rmtree(scratch)


def _units(scratch: Path) -> list[Path]:
    # A folder of the source is compiled as one: most of the time goes into reading PyTorch's headers.
    units = [path for path in _files() if path.suffix == ".cpp" and path.parent == SOURCE]
    for folder in ("machine", "operators"):
        unit = scratch / f"{folder}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in sorted((SOURCE / folder).glob("*.cpp"))))
        units.append(unit)
    return units[::-1]  # the longest first


def _compile(compiler: str, unit: Path, scratch: Path) -> Path:
    target = scratch / f"{unit.stem}.o"
    headers = Path(torch.__file__).parent / "include"
    folders = [headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    system = [flag for folder in folders for flag in ("-isystem", str(folder))]
    _run([compiler, *FLAGS, f"-I{SOURCE}", *system, "-c", str(unit), "-o", str(target)])
    return target


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_SHOWN_LINES:])
        raise BuildError(
            f"the simulated device could not be built for torch {torch.__version__} (CXX=... takes another compiler, "
            f"g++ 11 or clang 14 at least; Python.h comes with python3-dev). The compiler's last lines:\n{last}\n"
            f"The command, to run again:\n{shlex.join(command)}"
        )
