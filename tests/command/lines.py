"""What the command says: all of it where it succeeds, and its one line where it refuses."""
from __future__ import annotations

import pytest

from torchckpt.__main__ import main

__all__ = ["printed", "refused"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What it prints, with nothing on stderr."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr, with exit status 2 and nothing on stdout."""
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    return captured.err.rstrip("\n")
