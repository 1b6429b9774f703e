"""What the screen knows and what is selected on it: keys in, wishes out; nothing is drawn and nobody is asked here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from omlxd.cli.screen.feed import Look, Status
from omlxd.cli.screen.history import History
from omlxd.cli.values import named, one_line

MESSAGE_S: Final = 8.0
"""How long an answer stands in the last line."""
_PAGE: Final = 10
_STEPS: Final = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -_PAGE, "page down": _PAGE}
_BUSY_FIRST: Final = ("loading", "loaded", "unloading", "failed")
_QUIT: Final = ("q", "ctrl-c", "ctrl-d")


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be selected: a model by its name, or a request by its id."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user wants done: `pin`, `unpin`, `load`, `unload` or `abort`; and whether the model is pinned."""

    verb: str
    name: str
    pinned: bool = False

    @property
    def question(self) -> str:
        """To be sure that it is meant."""
        if self.verb == "unload" and self.pinned:
            return f"{named(self.name)} is pinned; unload it all the same?"
        what = "the request " if self.verb == "abort" else ""
        return f"{self.verb} {what}{named(self.name)}?"


@dataclass
class ScreenState:
    """The screen's own memory.

    Attributes:
        clock: monotonic seconds.
        status: the newest one there was; None before the first.
        trouble: why there is no newer one, in words; empty while all is well.
        history: memory used in the last minutes.
        selected: the row that keys are about.
        question: a wish that waits for its `y`.
        message: what the last wish came to.
        quits: the user has seen enough.
    """

    clock: Callable[[], float]
    status: Status | None = None
    trouble: str = ""
    history: History = field(default_factory=History)
    selected: Row | None = None
    question: Wish | None = None
    message: str = ""
    quits: bool = False
    _message_ends_s: float = 0.0
    _away_since_s: float | None = None

    @property
    def away_s(self) -> float:
        """Seconds since the daemon answered, if it does not now."""
        return 0.0 if self._away_since_s is None else self.clock() - self._away_since_s

    def see(self, look: Look) -> None:
        """Take in a look; while there is no status the last one stands."""
        if look.status is None:
            self.trouble = look.trouble.message if look.trouble is not None else "no answer"
            self._away_since_s = self.clock() if self._away_since_s is None else self._away_since_s
            return
        self.status, self.trouble, self._away_since_s = look.status, "", None
        self.history.add(self.clock(), look.status)

    def tell(self, message: str) -> None:
        """Show this in the last line for a while."""
        self.message, self._message_ends_s = one_line(message), self.clock() + MESSAGE_S

    @property
    def message_now(self) -> str:
        """The message, while it stands."""
        return self.message if self.clock() < self._message_ends_s else ""

    @property
    def models(self) -> list[dict[str, Any]]:
        """What is or was in memory first, since there may be no room for all; else as in the manifest."""
        models = list(self.status["models"]) if self.status is not None else []
        return sorted(models, key=lambda model: model["state"] not in _BUSY_FIRST)

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Oldest first, as the daemon has them."""
        return list(self.status["requests"]) if self.status is not None else []

    @property
    def rows(self) -> list[Row]:
        """All that can be selected, from top to bottom."""
        models = [Row("model", model["name"]) for model in self.models]
        return models + [Row("request", request["id"]) for request in self.requests]

    def press(self, key: str) -> Wish | None:
        """The wish that this key makes, or None."""
        question, self.question, self._message_ends_s = self.question, None, 0.0
        if key in _QUIT:
            self.quits = True
        elif question is not None:
            return question if key in ("y", "enter") else None
        elif key in _STEPS or key in ("home", "end"):
            self._move(key)
        elif key == "escape":
            self.selected = None
        else:
            return self._wish(key)
        return None

    def _move(self, key: str) -> None:
        rows = self.rows
        if not rows:
            return
        at = rows.index(self.selected) if self.selected in rows else None
        if key in ("home", "end"):
            at = 0 if key == "home" else len(rows) - 1
        elif at is None:
            at = 0 if _STEPS[key] > 0 else len(rows) - 1
        else:
            at += _STEPS[key]
        self.selected = rows[max(0, min(at, len(rows) - 1))]

    def _wish(self, key: str) -> Wish | None:
        """Pinning is undone as easily as it is done; what somebody may lose by is asked about first."""
        if key not in ("p", "l", "u", "a"):
            return None
        row = self.selected
        if row is None or row not in self.rows:
            self.tell("select a model or a request first, with the arrow keys")
            return None
        if (key == "a") != (row.kind == "request"):
            self.tell(
                f"{named(row.name)} is a {row.kind}; " + ("`a` is for requests" if key == "a" else "`a` aborts it")
            )
            return None
        if key == "a":
            self.question = Wish("abort", row.name)
            return None
        model = next(each for each in self.models if each["name"] == row.name)
        if key == "p":
            return Wish("unpin" if model["pinned"] else "pin", row.name)
        if key == "l":
            return Wish("load", row.name)
        if model["state"] == "unloaded":
            self.tell(f"{named(row.name)} is not loaded")
            return None
        self.question = Wish("unload", row.name, pinned=model["pinned"])
        return None
