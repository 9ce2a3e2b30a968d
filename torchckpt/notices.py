"""Notices: lines for people, on stderr where that is a terminal, and else in the log.

Of several ranks the first one says them, as ranks share a terminal.
"""
from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

__all__ = ["LOGGER", "notice", "terminal"]

LOGGER = logging.getLogger("torchckpt")


def terminal() -> TextIO | None:
    """Where stderr is a terminal, that; else None, as in a process without one, and on later ranks of ``torchrun``."""
    stream: TextIO | None = sys.stderr
    is_first = os.environ.get("RANK", "0") == "0"
    return stream if is_first and stream is not None and stream.isatty() else None


def notice(text: str) -> None:
    """Say one line."""
    stream = terminal()
    if stream is None:
        LOGGER.info(text)
    else:
        print(text, file=stream, flush=True)
