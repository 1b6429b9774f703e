"""`omlxd why`: why a model or a request is where it is, and what a decision rested on; from the log alone."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from omlxd.cli import lives, output, stories
from omlxd.cli.client import Client
from omlxd.cli.completion import model_names
from omlxd.cli.event_sentences import reason_of
from omlxd.cli.explain import explanation, headline
from omlxd.cli.happenings import happenings, when
from omlxd.cli.holder import is_held
from omlxd.cli.invocation import home_of
from omlxd.cli.known_models import names_by_alias, unknown_model
from omlxd.cli.log_lines import Log
from omlxd.cli.options import Json
from omlxd.cli.sentences import event_sentence
from omlxd.cli.stories import Record, Story
from omlxd.cli.values import moment, named, one_line
from omlxd.core.errors import OmlxError
from omlxd.core.states import SCHEMA, EntryState
from omlxd.daemon.files import require_regular
from omlxd.daemon.home import Home

WIDTH_ON_A_PIPE: Final = 200
EVENTS_OF_A_MODEL: Final = 8
EVENTS_OF_A_REQUEST: Final = 20
DAEMON_TIMEOUT_S: Final = 1.0
_LABEL_COLUMNS: Final = 11
_IS: Final[dict[str, str]] = {
    EntryState.UNLOADED: "not loaded",
    EntryState.LOADING: "being loaded",
    EntryState.LOADED: "loaded",
    EntryState.UNLOADING: "being unloaded",
    EntryState.FAILED: "not loaded, since loading it failed",
}


def why(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|REQUEST|DECISION]",
            help="A model, a request as `r12` or a decision as `d7`; without, the last decision.",
            autocompletion=model_names,
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("-n", "--lines", min=1, metavar="N", help="So many decisions, or events; default 1, 8 or 20."),
    ] = None,
    run: Annotated[
        int | None, typer.Option("--run", min=0, metavar="N", help="Only the daemon's run N runs ago; 0 is the newest.")
    ] = None,
    json: Json = False,
) -> None:
    """Explain what omlxd did, from its log; needs no running daemon."""
    home = home_of(context)
    require_regular(home.log)
    if not home.log.exists():
        raise OmlxError(f"there is no log at `{home.log}`", hint="`omlxd start` begins one")
    inquiry = _Inquiry(home, count, run, json)
    if what is None:
        inquiry.last_decisions()
        return
    names = names_by_alias(home)
    if what not in names and (found := re.fullmatch(r"(?:chatcmpl-|cmpl-)?(r\d+)", what)):
        inquiry.request(found[1])
    elif what not in names and re.fullmatch(r"d\d+", what):
        inquiry.decision(what)
    else:
        inquiry.model(what, names)


class _Inquiry:
    """One question to one log, and its answer on stdout."""

    def __init__(self, home: Home, count: int | None, runs_ago: int | None, json: bool) -> None:
        self._home, self._count, self._runs_ago, self._json = home, count, runs_ago, json
        self._now = time.time()
        self._alive = is_held(home.lock)
        self._status: dict[str, Any] = {}

    def last_decisions(self) -> None:
        story = self._search(lambda log: stories.of_decisions(log, self._count or 1, self._runs_ago))
        text = ""
        if not story.decisions:
            start = story.newest.started
            since = f" since the daemon started at {moment(start.get('ts'), self._now)}" if start else ""
            text = f"nothing has had to give way{since}: the log has no decision"
        elif story.level is not None and story.level.get("level_now") == "exhausted":
            text = f"memory is over the limit since {moment(story.level.get('ts'), self._now)}, and nothing is left to"
            text += f" do: {reason_of(story.level)}"
        if self._json:
            self._write_json("decisions", None, story, text, story.decisions)
            return
        if text:
            self._say(text)
        for number_, decision in enumerate(story.decisions):
            if number_ or text:
                output.data()
            self._explain(decision)
        if story.decisions and story.run.ago and self._runs_ago is None:
            output.note(f"nothing has had to give way since: this is of {_runs_before(story.run.ago)}")

    def decision(self, decision: str) -> None:
        story = self._search(lambda log: stories.of_decision(log, decision, self._runs_ago))
        found = story.decisions
        if not found:
            raise _nothing_on(f"decision `{decision}`", "`omlxd why -n 10` shows the last decisions")
        if self._json:
            self._write_json("decision", decision, story, headline(found[0], self._now), found[:1])
            return
        self._explain(found[0])
        self._note_run(story, decision)

    def request(self, request: str) -> None:
        story = self._search(lambda log: stories.of_request(log, request, self._runs_ago))
        if not story.events:
            raise _nothing_on(f"request `{request}`", "`omlxd logs --event request_started` shows the last ones")
        answer = lives.of_request(request, story, alive=self._alive, now=self._now)
        arrived = lives.arrived_at(story, request)
        self._answer("request", request, story, answer, arrived)
        if not self._json:
            self._note_run(story, request)

    def model(self, name: str, names: dict[str, str]) -> None:
        model = names.get(name, name)
        story = self._search(lambda log: stories.of_model(log, model, self._runs_ago))
        if not story.events and story.last_request is None and not story.passed_over and model not in names:
            raise unknown_model(name, names)
        self._answer("model", model, story, lives.of_model(model, story, alive=self._alive, now=self._now), None)
        if (state := self._state_now(model)) is not None and not self._json:
            output.note(f"now {named(model)} is {state}: that the daemon says itself")

    def _answer(self, kind: str, name: str, story: Story, answer: lives.Answer, arrived: float | None) -> None:
        decisions = [answer.decision] if answer.decision is not None else []
        if self._json:
            self._write_json(kind, name, story, answer.text, decisions)
            return
        self._say(answer.text)
        most = self._count or (EVENTS_OF_A_MODEL if kind == "model" else EVENTS_OF_A_REQUEST)
        for waiting in story.waiting[:most] if self._alive else ():
            self._say(f"{event_sentence(waiting)}, since {moment(waiting.get('ts'), self._now)}")
        for decision in decisions:
            output.data()
            self._explain(decision)
        lines = happenings(name, story, most, arrived)
        if lines:
            output.data()
        width = max((len(when(at, self._now)) for at, _ in lines), default=0)
        for at, text in lines:
            self._wrapped(f"{when(at, self._now):<{width}}  ", text)

    def _explain(self, decision: Record) -> None:
        self._wrapped("", headline(decision, self._now), colour="1")
        loads = stories.loads_around(Log(self._home.log), decision)
        for paragraph in explanation(decision, loads, self._now):
            label = f"  {paragraph.label}"
            for line in paragraph.lines:
                self._wrapped(f"{label:<{_LABEL_COLUMNS}}", line)
                label = ""

    def _note_run(self, story: Story, name: str) -> None:
        """Ids begin anew with each run: say which one this was when it was not the newest."""
        if story.run.ago and self._runs_ago is None:
            output.note(f"`{name}` is of {_runs_before(story.run.ago)}")

    def _search(self, look: Callable[[Log], Story]) -> Story:
        log = Log(self._home.log)
        story = look(log)
        if log.damaged:
            output.note(f"left out {log.damaged} damaged {'line' if log.damaged == 1 else 'lines'} of the log")
        for record in story.lost[:1]:
            output.note(f"{event_sentence(record)}, before {moment(record.get('ts'), self._now)}: this may not be all")
        if self._alive:
            self._status = _status(self._home)
        if trouble := self._log_trouble:
            output.note(f"the log has not all that happened, {trouble}")
        return story

    @property
    def _log_trouble(self) -> str | None:
        """What the daemon says of its log, if it says anything."""
        trouble = self._status.get("log_trouble")
        return one_line(trouble) if isinstance(trouble, str) else None

    def _state_now(self, model: str) -> str | None:
        """Where the daemon says that the model is, when its log may not say it."""
        if self._log_trouble is None:
            return None
        models = self._status.get("models", ())
        found = next((each for each in models if isinstance(each, dict) and each.get("name") == model), None)
        return None if found is None else _IS.get(str(found.get("state")))

    def _say(self, text: str) -> None:
        self._wrapped("", text)

    def _wrapped(self, head: str, text: str, *, colour: str = "") -> None:
        """The text beside its head, in as many lines as it takes; columns of a table keep their blanks."""
        lines = textwrap.wrap(
            output.glued(text), max(20, _width() - len(head)), break_long_words=False, break_on_hyphens=False
        )
        for line in lines or [""]:
            whole = output.unglued(f"{head}{line}").rstrip()
            output.data(output.painted(whole, colour, sys.stdout) if colour else whole)
            head = " " * len(head)

    def _write_json(self, kind: str, name: str | None, story: Story, text: str, decisions: list[Record]) -> None:
        run = story.run
        output.data_json(
            {
                "schema": SCHEMA,
                "about": {"kind": kind, "name": name},
                "answer": text,
                "run": {
                    "ago": run.ago,
                    "started_ts": (run.started or {}).get("ts"),
                    "stopped_ts": (run.stopped or {}).get("ts"),
                    "alive": self._alive and run.ago == 0,
                },
                "log_trouble": self._log_trouble,
                "decisions": decisions,
                "events": [record for _, record in reversed(story.events)],
            }
        )


def _status(home: Home) -> dict[str, Any]:
    """What a running daemon says of itself; nothing when it does not answer: the log is read without it."""
    try:
        return Client(home.socket).get("/v1/control/status", timeout_s=DAEMON_TIMEOUT_S)
    except OmlxError:
        return {}


def _runs_before(ago: int) -> str:
    return f"an earlier run of the daemon ({ago} before the newest)"


def _nothing_on(what: str, hint: str) -> OmlxError:
    return OmlxError(f"the log has nothing on {what}", hint=hint)


def _width() -> int:
    return shutil.get_terminal_size((WIDTH_ON_A_PIPE, 24)).columns
