"""The daemon's process with steps that can be made to raise: `python -m tests.faults.broken_daemon ...`.

It takes the options of `python -m omlxd.daemon`. A file `mishap.WHERE` in the home makes the next step of that kind
raise what the file says, `MODEL TypeName text`, and is gone then; a model `*` is any.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlxd.daemon.__main__ import main
from omlxd.engine import decode_lanes, executor, kv_caches, loader, mlxlm, resident, running, unloading

SEAMS: dict[str, tuple[Any, str]] = {
    "batch": (decode_lanes.DecodeBatch, "step"),
    "lone": (decode_lanes.LoneDecode, "step"),
    "joining": (decode_lanes.LoneDecode, "leave"),
    "prefill": (mlxlm, "prefill_chunk"),
    "token": (running.Running, "accept"),
    "leaving": (kv_caches, "make_contiguous"),
    "load": (loader, "next_slice"),
    "unload": (unloading, "trim_heap"),
    "plan": (executor.PlanExecutor, "follow"),
}
"""Where it can be made to raise: on the engine's thread, inside a step."""
IN_A_MODEL = ("prefill_step", "decode_step", "remove")

_model = ""


def break_next(home: Path, where: str, error: str, model: str = "*") -> Path:
    """Ask for it; the file is gone when it has happened."""
    asked = home / f"mishap.{where}"
    ready = asked.with_suffix(".new")
    ready.write_text(f"{model} {error}")
    return ready.rename(asked)


def _raising(asked: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if asked.exists():
            model, kind, text = asked.read_text().split(" ", 2)
            if model in ("*", _model):
                asked.unlink()
                raise getattr(builtins, kind)(text)
        return function(*arguments, **named)

    return wrapped


def _in_its_name(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: resident.ResidentModel, *arguments: Any, **named: Any) -> Any:
        global _model
        _model = self.name
        return function(self, *arguments, **named)

    return wrapped


if __name__ == "__main__":
    at = Path(sys.argv[sys.argv.index("--home") + 1])
    for name, (owner, attribute) in SEAMS.items():
        setattr(owner, attribute, _raising(at / f"mishap.{name}", getattr(owner, attribute)))
    for attribute in IN_A_MODEL:
        setattr(resident.ResidentModel, attribute, _in_its_name(getattr(resident.ResidentModel, attribute)))
    sys.exit(main())
