"""Special: what some models of diffusers need beside the rules for names."""
from __future__ import annotations

from typing import Any

SPECIAL: dict[str, dict[str, Any]] = {}
