"""A benchmark beside an earlier one: the file that `bench --json` wrote, and the ratios to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omlxd.cli.values import named, number
from omlxd.core.errors import InvalidRequest
from omlxd.core.states import SCHEMA

if TYPE_CHECKING:
    from omlxd.cli.bench_report import Report

_HINT: Final = "`omlxd bench MODEL --json > FILE` writes one"
_SETTINGS: Final = ("model", "backend", "machine", "prompt_tokens", "generate_tokens")


def read_report(path: Path) -> dict[str, Any]:
    """What an earlier benchmark wrote; raises InvalidRequest when it is anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InvalidRequest(f"cannot compare with `{path}`: {why}", hint=_HINT) from None
    whole = isinstance(found, dict) and isinstance(found.get("speed"), list) and found.get("schema") == SCHEMA
    if not whole or not all(isinstance(each, dict) for each in found["speed"]):
        raise InvalidRequest(f"`{path}` is not what a benchmark wrote", hint=_HINT)
    return dict(found)


def compared(report: Report, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Each figure as a part of the earlier one (2 is twice as much), null where one of the two is missing.

    `differences` says in words what was not the same.
    """
    now = report.to_json()
    rows = []
    for row in now["speed"]:
        before: dict[str, Any] = next((each for each in earlier["speed"] if each.get("streams") == row["streams"]), {})
        figures = ("prefill_tokens_per_s", "first_token_s", "decode_tokens_per_s", "gap_p99_s")
        ratios = {figure: _ratio(_median(row, figure), _median(before, figure)) for figure in figures}
        rows.append({"streams": row["streams"], **ratios})
    load, load_before = now["load"] or {}, earlier.get("load")
    before_s = load_before.get("load_s") if isinstance(load_before, dict) else None
    return {
        "speed": rows,
        "load_s": _ratio(load.get("load_s"), before_s),
        "differences": [
            f"{key.replace('_', ' ')} {_said(earlier.get(key))} instead of {_said(now[key])}"
            for key in _SETTINGS
            if earlier.get(key) != now[key]
        ],
    }


def _median(row: Mapping[str, Any], figure: str) -> Any:
    found = row.get(figure)
    return found.get("median") if isinstance(found, Mapping) else None


def _ratio(now: Any, before: Any) -> float | None:
    mine, theirs = number(now), number(before)
    return mine / theirs if mine is not None and theirs else None


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return named(" ".join(str(each) for each in value.values()))
    return named(value)
