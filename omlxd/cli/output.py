"""What goes where: data on stdout, everything else on stderr; errors with their hint, and one line of progress."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self, TextIO

from omlxd.core.errors import ManifestInvalid, OmlxError

_ASCII: Final = str.maketrans(
    {
        "→": "->",
        "…": "...",
        "·": "-",
        "≤": "<=",
        "≥": ">=",
        "×": "x",
        "–": "-",
        "—": "-",
        "█": "#",
        "░": ".",
        "│": "|",
        "└": "\\",
        "›": ">",
        "✓": "+",
        "✗": "x",
    }
)

_CODE: Final = re.compile(r"`[^`\n]*`")
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[KMGTPE]?i?B|ms|s|min|h|tokens?)\b)")
_GLUE: Final = "\ue000"  # a blank that is no place to break; from the range that no text uses
_NARROWEST: Final = 20

_LEVEL_COLOURS: Final = {"warning": "33", "error": "31", "debug": "2"}


def data(text: str = "") -> None:
    """One line of what was asked for, to stdout."""
    sys.stdout.write(ornamented(text, sys.stdout) + "\n")


def sentence(text: str, *, label: str = "", sgr: str = "", hang: int = 2) -> None:
    """Some words of what was asked for, to stdout; on a terminal broken between words.

    Args:
        text: what is said; its own lines stay lines.
        label: what stands before it.
        sgr: the colour of the label.
        hang: by how many columns the following lines are set in.
    """
    sys.stdout.write(_labelled(text, label, sgr, sys.stdout, hang) + "\n")


def data_json(body: Any) -> None:
    """The answer as JSON, to stdout: indented on a terminal, one line on a pipe."""
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(body, indent=indent, ensure_ascii=not is_utf8(sys.stdout)) + "\n")


def note(text: str) -> None:
    """A sentence about what is going on, to stderr; on a terminal broken between words."""
    _note(text)


def warn(text: str) -> None:
    """`warning: ...`, to stderr."""
    _note(text, "warning:", "33")


def report(error: OmlxError) -> None:
    """`error: ...` and `hint: ...`, to stderr; a bad manifest has all its problems between the two."""
    _note(error.message, "error:", "1;31")
    if isinstance(error, ManifestInvalid):
        for problem in error.problems:
            note(f"  {problem}")
    if error.hint:
        _note(error.hint, "hint:", "36")


def _note(text: str, label: str = "", sgr: str = "") -> None:
    sys.stderr.write(_labelled(text, label, sgr, sys.stderr, 2) + "\n")


def _labelled(text: str, label: str, sgr: str, stream: TextIO, hang: int) -> str:
    """The label in its colour and the text, broken as if there were no colour."""
    label, text = ornamented(label, stream), ornamented(text, stream)
    whole = wrapped(f"{label} {text}" if label else text, stream, hang=hang)
    return (painted(label, sgr, stream) if label else "") + whole[len(label) :]


def wrapped(text: str, stream: TextIO, *, hang: int = 2) -> str:
    """The text as a terminal has room for it, broken between words; on anything else as it is.

    Code in backticks is kept whole where a line has room for it, and what has no blanks (a path) always is, so that it
    can be copied; so are a number and its unit. Lines that are quoted with `|` stay as somebody else wrote them.
    """
    if not is_terminal(stream):
        return text
    width = max(columns(stream), _NARROWEST)
    return "\n".join(_broken(line, width, hang) for line in text.split("\n"))


def glued(text: str) -> str:
    """The text with no place to break between a number and its unit, until it is `unglued`."""
    return _UNIT.sub(_GLUE, text)


def unglued(text: str) -> str:
    """The text with all its blanks again."""
    return text.replace(_GLUE, " ")


def columns(stream: TextIO) -> int:
    """The columns for text on a terminal: COLUMNS where somebody has set it, or as many as there are now."""
    wanted = os.environ.get("COLUMNS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) else _columns(stream)


def _broken(line: str, width: int, hang: int) -> str:
    words = line.lstrip(" ")
    if len(line) <= width or words.startswith("|"):
        return line
    indent = " " * (len(line) - len(words))
    hanging = indent + " " * min(hang, width // 4)

    def whole(code: re.Match[str]) -> str:
        return code[0].replace(" ", _GLUE) if len(hanging) + len(code[0]) <= width else code[0]

    filled = textwrap.fill(
        _CODE.sub(whole, glued(words)),
        width,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )
    return unglued(filled)


def ornamented(text: str, stream: TextIO) -> str:
    """The text with arrows and dots, or with plain ASCII ones where the stream or the locale has no others."""
    return text if is_utf8(stream) else text.translate(_ASCII)


def painted(text: str, sgr: str, stream: TextIO) -> str:
    """The text in a colour (an SGR code) where the stream is a terminal that wants colours."""
    return f"\x1b[{sgr}m{text}\x1b[0m" if is_colourful(stream) else text


def painted_by_level(text: str, level: object, stream: TextIO) -> str:
    """A line of the log in the colour of its severity, where the stream wants colours."""
    colour = _LEVEL_COLOURS.get(level, "") if isinstance(level, str) else ""
    return painted(text, colour, stream) if colour else text


def is_colourful(stream: TextIO) -> bool:
    """Whether this is a terminal with colours, and the user has nothing against them (NO_COLOR)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def is_terminal(stream: TextIO) -> bool:
    """Whether lines may be redrawn here."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_utf8(stream: TextIO) -> bool:
    """Whether arrows, dots and bars can be shown; an explicit C locale says no, although Python writes UTF-8 then."""
    if (os.environ.get("LC_ALL") or os.environ.get("LANG")) in ("C", "POSIX"):
        return False
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


def never_fail_to_encode() -> None:
    """Let a character that a stream cannot show become `?` (or an escape) and not an exception."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


class Progress:
    """One line on stderr that is redrawn, only where stderr is a terminal; `with` clears it at the end."""

    def __init__(self) -> None:
        self._live = is_terminal(sys.stderr)
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Replace the line; a percentage in it gets a bar. What is longer than the terminal is cut off."""
        if self._live and text != self._shown:
            self._shown = text
            line = ornamented(with_bar(text), sys.stderr)
            sys.stderr.write(f"\r\x1b[2K{cut(line, _columns(sys.stderr) - 1)}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away, before anything else is written."""
        if self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._shown = ""


def with_bar(text: str, cells: int = 20) -> str:
    """The text with a bar before its first percentage, if it has one."""
    before, sign, after = text.partition("%")
    words, _, number = before.rstrip().rpartition(" ")
    if not sign or not number.isdigit():
        return text
    filled = min(100, int(number)) * cells // 100
    return f"{words} {'█' * filled}{'░' * (cells - filled)} {number}%{after}".lstrip()


def cut(text: str, columns: int) -> str:
    """The text on one line of at most so many columns, without what would move the cursor."""
    from unicodedata import east_asian_width  # for the rare text that is long or foreign

    shown, used = "", 0
    for char in text:
        char = char if char.isprintable() else "?"
        used += 2 if east_asian_width(char) in "WF" else 1
        if used > columns:
            break
        shown += char
    return shown


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def percent(done: Mapping[str, Any]) -> str:
    """` 42 %` of a progress record with `done_bytes` and `total_bytes`, or nothing when the total is unknown."""
    total = done.get("total_bytes") or 0
    return f" {100 * (done.get('done_bytes') or 0) // total} %" if total else ""
