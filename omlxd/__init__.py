"""omlxd keeps several language models in one process under a memory limit that holds.

The library form: `EnginePool` and `ProcessMemoryEnforcer` inside your own asyncio program (see `examples/embed.py`).
Importing this package is cheap; the names below are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omlxd.core.manifest import ModelSettings
    from omlxd.daemon.enforcer import ProcessMemoryEnforcer
    from omlxd.daemon.pool import EnginePool

__version__ = "0.1.0"
__all__ = ["EnginePool", "ModelSettings", "ProcessMemoryEnforcer", "__version__"]

_HOMES = {
    "EnginePool": "omlxd.daemon.pool",
    "ProcessMemoryEnforcer": "omlxd.daemon.enforcer",
    "ModelSettings": "omlxd.core.manifest",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
