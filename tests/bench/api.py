"""Our API and `mlx_lm.server`'s, field by field: `python -m tests.bench.api [--all] [--json]`.

The same requests go to both, on the same model, whose answers are known (`tests.fakes.scripted_model`). Of each answer
all fields are compared; without `--all` only those that differ are shown.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.api_requests import CONTEXT, PLAIN, Asked, requests
from tests.bench.scratch import CHECKOUT
from tests.bench.servers import PEER, Address, mlx_lm_server, our_daemon

TIMEOUT_S = 60.0
_OF_ANY_ANSWER = ("HTTP status", "error", "error's fields", "answers the next")
SAME, DIFFERENT, OURS, THEIRS = "same", "different", "ours only", "theirs only"
_MAKE = "import sys; from pathlib import Path; from tests.fakes.scripted_model import make_scripted;" + (
    " make_scripted(Path(sys.argv[1]), context=int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One field of one answer; None where a side has no such field."""

    request: str
    field: str
    verdict: str
    ours: Any
    theirs: Any


def main() -> int:
    """Ask both and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.api", description=f"Our API beside {PEER}'s.")
    parser.add_argument("--all", action="store_true", help="also the fields that are the same")
    parser.add_argument("--json", action="store_true", help="all lines as JSON")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # their server looks for an unknown model there
    lines = list(compared())
    if arguments.json:
        json.dump([asdict(line) for line in lines], sys.stdout, indent=1)
        print()
        return 0
    print(table([line for line in lines if arguments.all or line.verdict != SAME]))
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(line.verdict for line in lines).most_common()))
    return 0


def compared() -> Iterator[Line]:
    """Start both servers, ask, and compare; one that a request has broken is started anew for the next."""
    with tempfile.TemporaryDirectory(prefix="omlxd-api-") as root:
        model, home = Path(root) / "model", Path(root) / "home"
        subprocess.run([sys.executable, "-c", _MAKE, str(model), str(CONTEXT)], cwd=CHECKOUT, check=True)
        home.mkdir(mode=0o700)
        with our_daemon(home, {"chat": model}) as daemon, ExitStack() as peers:
            daemon.load("chat")
            peer, _ = peers.enter_context(mlx_lm_server(model))
            for asked in requests():
                ours, theirs = _answered(asked, daemon.api, "chat"), _answered(asked, peer, "default_model")
                for field in _fields(ours, theirs):
                    yield Line(asked.what, field, _verdict(field, ours, theirs), ours.get(field), theirs.get(field))
                if theirs["answers the next"] is False:
                    peers.close()
                    peer, _ = peers.enter_context(mlx_lm_server(model))


def _fields(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """All fields of both; of an answer beside an error only that it is one."""
    fields = dict.fromkeys([*ours, *theirs])
    if ("error" in ours) is ("error" in theirs):
        return list(fields)
    return [field for field in fields if field in _OF_ANY_ANSWER]


def _answered(asked: Asked, address: Address, model: str) -> dict[str, Any]:
    """The answer's fields, and whether a plain request is still answered after it."""
    found = fields_of(asked, address, model)
    return {**found, "answers the next": fields_of(PLAIN, address, model)["HTTP status"] == http.client.OK}


def _verdict(field: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What is null on one side and missing on the other is the same to a client."""
    if ours.get(field) == theirs.get(field):
        return SAME
    return OURS if field not in theirs else THEIRS if field not in ours else DIFFERENT


def fields_of(asked: Asked, address: Address, model: str) -> dict[str, Any]:
    """The answer as a flat table of fields; those of a stream's frames come together under `frames[]`."""
    with closing(http.client.HTTPConnection(*address, timeout=TIMEOUT_S)) as connection:
        try:
            connection.request(asked.method, asked.path, asked.content(model), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return {"HTTP status": f"no answer ({type(error).__name__})"}
    fields: dict[str, Any] = {"HTTP status": response.status, "content-type": response.getheader("content-type")}
    if str(fields["content-type"]).startswith("text/event-stream"):
        return {**fields, **_stream_fields(content)}
    try:
        return {**fields, **_flat(json.loads(content))}
    except ValueError:
        return {**fields, "body": "not JSON"}


def _stream_fields(content: str) -> dict[str, Any]:
    """Fields of all frames; text of the answer is put together, of other fields the first value stands."""
    fields: dict[str, Any] = {}
    frames = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
    for frame in frames:
        if frame == "[DONE]":
            continue
        for field, value in _flat(json.loads(frame)).items():
            at = f"frames[].{field}"
            if field.endswith((".content", ".reasoning", ".reasoning_content", "].text")):
                fields[at] = (fields.get(at) or "") + (value or "")
            elif fields.get(at) is None:
                fields[at] = value
    return {**fields, "last frame": frames[-1] if frames and frames[-1] == "[DONE]" else "an object"}


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    """Leaves by their path. Lists of objects are taken by their first element; what differs each time, by its kind."""
    if at == "error":
        fields = sorted(value) if isinstance(value, dict) else []
        return {"error": value["message"] if fields else value, "error's fields": ", ".join(fields) or "none, a text"}
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{at}.{key}" if at else key)
        return found
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {f"{at}[] length": len(value), **_flat(value[0], f"{at}[]")}
    return {at: _kind(at, value)}


def _kind(at: str, value: Any) -> Any:
    name = at.rpartition(".")[2]
    if name == "id" and isinstance(value, str):
        return "an id" if "-" not in value else f"{value.partition('-')[0]}-…" if value.startswith("c") else "an id"
    if name in (
        "cached_tokens",
        "created",
        "first_token_s",
        "tokens_per_s",
        "uptime_s",
        "system_fingerprint",
        "logprob",
    ):
        return f"a {type(value).__name__}"
    if name == "model":
        return "the model's name"
    return value


def table(lines: list[Line]) -> str:
    """One line for each field, under the request that it answers."""
    told, request = [], ""
    for line in lines:
        if line.request != request:
            request = line.request
            told.append(request)
        told.append(f"  {line.field:<44} {line.verdict:<12} {_short(line.ours):<50} {_short(line.theirs)}".rstrip())
    return "\n".join(told)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value is not None else "–"
    return text if len(text) <= 48 else text[:47] + "…"


if __name__ == "__main__":
    sys.exit(main())
