"""Why there is no simulated device: each error is one paragraph with its remedy."""
from __future__ import annotations

__all__ = ["BuildError", "DeviceError", "NoCompilerError", "NotSupportedError"]


class DeviceError(RuntimeError):
    """The base of all."""


class NoCompilerError(DeviceError):
    """This machine has no C++ compiler for it. Tests that need the device are skipped."""


class NotSupportedError(DeviceError):
    """The installed torch is not one of those that the device was written for, or it came too late for it."""


class BuildError(DeviceError):
    """The compiler did not accept the source."""
