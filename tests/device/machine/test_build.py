"""The build: once for each torch and source, and clear about what is missing."""
from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.device import BuildError, NoCompilerError, NotSupportedError, build, why_not
from tests.scripts import run

COMPILER = """#!{python}
import pathlib, sys, time
if "--version" not in sys.argv:
    with open({log!r}, "a") as log:
        log.write("shared\\n" if "-shared" in sys.argv else "unit\\n")
    time.sleep(0.05)
    pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("built")
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What a compiler that does nothing was asked for, a line each."""
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(log)))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHCKPT_CACHE", str(tmp_path / "cache"))
    return log


ONE_BUILD = ["unit", "unit", "unit", "shared"]


def test_a_library_is_built_once(log, tmp_path, capsys):
    first = build.library()
    assert build.library() == first
    assert log.read_text().split() == ONE_BUILD
    assert first.read_text() == "built"
    assert first.name.startswith(torch.__version__)
    assert {path.suffix for path in first.parent.iterdir()} == {".so", ".lock"}
    assert capsys.readouterr().err.count("building the simulated device for torch") == 1


def test_two_processes_build_it_once(log):
    program = (
        "import os; from tests.device import build\n"
        "other = os.fork(); build.library()\n"
        "if other: print(os.waitpid(other, 0)[1])"
    )
    done = run("-c", program, CXX=os.environ["CXX"], TORCHCKPT_CACHE=os.environ["TORCHCKPT_CACHE"])
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert log.read_text().split() == ONE_BUILD


def test_another_source_or_compiler_is_another_library(log, monkeypatch):
    one = build.library()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.library() != one


def test_a_build_that_fails_shows_the_last_lines_and_the_command(log, monkeypatch):
    compiler = Path(os.environ["CXX"])
    lines = "".join(f"line {number}\\n" for number in range(40))
    compiler.write_text(f"#!/bin/sh\ncase $* in *--version*) exit 0;; esac\nprintf '{lines}' >&2\nexit 1\n")
    with pytest.raises(BuildError) as error:
        build.library()
    text = str(error.value)
    assert text.startswith(f"the simulated device could not be built for torch {torch.__version__} (CXX=... takes ")
    assert "line 27\n" not in text
    assert "\nline 28\n" in text
    assert f"line 39\nThe command, to run again:\n{compiler} -std=c++20 " in text
    unit = Path(text.split(" -c ")[1].split()[0])
    assert unit.exists()  # to run the command again


def test_a_cache_that_cannot_be_written(log, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHCKPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match=r"a folder that can be written, and .* is none .*: set TORCHCKPT_CACHE"):
        build.library()


@pytest.mark.usefixtures("without_a_gpu")
def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not() == (
        "the simulated device needs a C++ compiler, and CXX=no-such-compiler is no program: apt-get install g++, "
        "or set CXX"
    )
    with pytest.raises(NoCompilerError, match="apt-get install"):
        build.library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no g++, clang++ or c++: apt-get install g++, or set CXX" in (why_not() or "")


def test_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    expected = "this machine has CUDA; CUDA_VISIBLE_DEVICES= python -m pytest has the simulated device instead"
    assert why_not() == expected


@pytest.fixture
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_a_gpu")
def test_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not() == "the simulated device is built on Linux, and this is darwin: use a container"


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "3.0.0"])
def test_a_torch_that_is_not_supported(version):
    with pytest.raises(NotSupportedError, match=r"for torch 2\.11 to 2\.15, and this is torch .*: pip install "):
        build.check_supported(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1", torch.__version__])
def test_a_torch_that_is_supported(version):
    build.check_supported(version)


# the process ----------------------------------------------------------------------------------------------------------


LOAD = "import torch; from tests.device import load; load"


def run_strictly(program):
    done = run("-c", f"import warnings; warnings.simplefilter('error')\n{program}")
    return done.returncode, done.stdout.strip(), done.stderr.strip().splitlines()[-1:]


def test_load_comes_before_the_first_backward(simulator):
    code, _, error = run_strictly(f"import torch; torch.ones(1, requires_grad=True).sum().backward(); {LOAD}()")
    assert code == 1
    assert error[0].startswith("tests.device.errors.NotSupportedError: autograd has no threads for the simulated ")


def test_the_number_of_devices_is_set_once(simulator):
    code, output, error = run_strictly(f"{LOAD}(8); load(4)\nprint(torch.zeros(1, device='sim:7').device)\nload(9)")
    assert (code, output) == (1, "sim:7")
    assert error == ["tests.device.errors.DeviceError: this process has 8 simulated devices, and not 9: load(9) first"]


def test_a_process_ends_with_work_in_its_streams(simulator):
    program = (
        f"{LOAD}()\nx = torch.ones(100, 100, device='sim')\n"
        "torch.sim._sleep(200_000_000)\nfor _ in range(100): x = x @ x"
    )
    assert run_strictly(program) == (0, "", [])


def test_a_forked_process_is_told_that_it_cannot_use_the_devices(simulator):
    program = (
        f"{LOAD}()\nimport os; torch.ones(1, device='sim')\n"
        "if os.fork() == 0:\n"
        "    try: torch.ones(1, device='sim')\n"
        "    except RuntimeError as error: print(str(error)[:30], torch.sim._is_in_bad_fork(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    code, output, _ = run_strictly(program)
    assert (code, output) == (0, "sim: a device was used before  True")
