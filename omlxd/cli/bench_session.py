"""The model of a benchmark: made ready, asked, and left as it was found, also when somebody presses Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from omlxd.cli import output
from omlxd.cli.bench_disturbances import Watch
from omlxd.cli.bench_figures import Round, Stream
from omlxd.cli.client import model_path
from omlxd.cli.models import load_with_progress
from omlxd.core.errors import Busy, OmlxError, UnknownModel, Unreachable

if TYPE_CHECKING:
    from omlxd.cli.client import Client

ROUTE: Final = "/v1/completions"
_UNUSED_WITHIN_S: Final = 2.0
_AT_REST: Final = ("unloaded", "failed")


@dataclass(slots=True)
class Session:
    """One model that is there to be asked.

    Attributes:
        view: the daemon's, once it is loaded.
        loaded_now: whether it was loaded for this, and not before.
    """

    client: Client
    view: dict[str, Any]
    loaded_now: bool
    watch: Watch
    _asked: int = field(default=0)

    def ask(self, prompt_tokens: int, generate_tokens: int, streams: int, what: str) -> Round:
        """Have prompts of exactly so many tokens answered at the same moment, each with exactly so many tokens.

        Their ids are drawn from the vocabulary, no two prompts alike and the same ones in each benchmark; none of it
        goes through the prefix cache.

        Raises:
            OmlxError: whatever the daemon says against it.
        """
        self._asked += 1
        draw = Random(self._asked)
        vocabulary = range(self.view["vocab_size"])
        body = {
            "model": self.view["name"],
            "prompt": [draw.choices(vocabulary, k=prompt_tokens) for _ in range(streams)],
            "max_tokens": generate_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": False,
            "timings": True,
        }
        self.watch.begin()
        found = _answers(self.client, body, what, streams * generate_tokens)
        if len(found) < streams:
            raise Unreachable("the daemon did not answer all prompts", hint="`omlxd logs -n 20` shows what happened")
        ours = [stream.measured["request"] for stream in found]
        return Round(tuple(found), self.watch.since(ours))

    def plan(self, tokens: int | None, streams: int) -> dict[str, Any]:
        """What `omlxd plan` says of the model with a context of so many tokens, and so many requests at a time."""
        return plan(self.client, self.view["name"], tokens, streams)


@contextmanager
def made_ready(client: Client, name: str, pid: int, *, reload: bool) -> Iterator[Session]:
    """Load the model if it is not loaded, or with `reload` in any case, and leave it afterwards as it was before.

    Raises:
        Busy: it is in use, and would have to be unloaded.
        OmlxError: it cannot be loaded.
    """
    before = _view(client, name)
    if reload and before["state"] == "loaded" and _in_use(before):
        raise Busy(
            f"`{name}` is in use, and `--reload` would unload it",
            hint="try again when `omlxd requests` shows none of it, or leave `--reload` out",
        )
    try:
        if reload and before["state"] == "loaded":
            client.call("POST", model_path(name, "unload"), {}, timeout_s=None)
        loaded = load_with_progress(client, name)
        for gone in loaded.get("evicted", ()):
            output.note(f"unloaded `{gone}` to make room")
        watch = Watch(client, name, pid)
        yield Session(client, loaded["model"], loaded.get("load_s") is not None, watch)
    finally:
        with suppress(OmlxError):  # a daemon that is gone has nothing left to put back
            _leave(client, name, before["state"])


def plan(client: Client, name: str, tokens: int | None, streams: int) -> dict[str, Any]:
    """The daemon's plan for one model, as `omlxd plan --json` has it in `models`.

    Raises:
        UnknownModel, InvalidRequest: there is no such model, or it cannot have such a context or so many requests.
    """
    query = urlencode({"model": name, "concurrency": streams} | ({"context": tokens} if tokens else {}))
    return dict(client.get(f"/v1/control/plan?{query}")["models"][0])


def _answers(client: Client, body: dict[str, Any], what: str, tokens: int) -> list[Stream]:
    events, pieces = client.sse(ROUTE, body), 0
    found: list[Stream] = []
    with closing(events), output.Progress() as progress:
        progress.show(what)
        for event in events:
            if isinstance(event, str):
                progress.show(f"{what}: {event}")
                continue
            pieces += 1
            progress.show(f"{what}: answering {min(99, 100 * pieces // tokens)}%")
            if (figures := event.get("omlxd")) is not None:
                measured = figures["measured"]
                found.append(Stream(figures["prompt_tokens"], tuple(measured["token_s"]), measured))
    return found


def _view(client: Client, name: str) -> dict[str, Any]:
    models: Sequence[dict[str, Any]] = client.get("/v1/control/models")["models"]
    if (found := next((each for each in models if each["name"] == name), None)) is None:
        raise UnknownModel(f"the manifest has lost its model `{name}`")
    return found


def _in_use(view: dict[str, Any]) -> bool:
    return bool(view["running"] or view["waiting"] or view["parked"])


def _leave(client: Client, name: str, state_before: str) -> None:
    if state_before == "loaded":
        if _view(client, name)["state"] in ("unloading", *_AT_REST):
            client.call("POST", model_path(name, "load"), {"wait": False})
    elif state_before in _AT_REST:
        deadline_s = time.monotonic() + _UNUSED_WITHIN_S
        while (in_use := _in_use(_view(client, name))) and time.monotonic() < deadline_s:
            time.sleep(0.05)  # a request of ours that was interrupted ends with the engine's next step
        if in_use:
            output.note(f"`{name}` stays loaded: others use it now")
        else:
            client.call("POST", model_path(name, "unload"), {}, timeout_s=None)
