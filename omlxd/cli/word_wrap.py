"""Text broken between words for a terminal while it streams: only the word that is not finished yet is held back."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Final

_BLANKS: Final = frozenset(" \t\u3000")
_TAB: Final = 8
_JOINER: Final = "\u200d"  # makes one emoji of two
_NO_BREAK_BEFORE: Final = frozenset({"Pe", "Pf", "Po", "Lm", "Sk"})
_NO_BREAK_AFTER: Final = frozenset({"Ps", "Pi"})
_FENCE: Final = re.compile(r"(`{3,})[^`]*|(~{3,}).*")


class WordWrap:
    """Breaks lines where a blank stands or, in scripts without blanks, between wide characters.

    The cursor is never moved, so that a terminal whose size changes shows the same words. A word that is longer than a
    line is left to the terminal, and so are the lines of a fenced code block, which can be copied then.

    Args:
        columns: of the terminal now, asked before each word.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._out: list[str] = []
        self._fence = self._code_line = ""
        self._begin_line()

    def feed(self, piece: str) -> str:
        """What can be written of the text so far."""
        for char in piece:
            self._take(char)
        return self._written()

    def rest(self) -> str:
        """What was held back; the text is over."""
        self._end_word()
        self._fence = self._code_line = ""
        self._begin_line()
        return self._written()

    def _written(self) -> str:
        written = "".join(self._out)
        self._out.clear()
        return written

    def _begin_line(self) -> None:
        self._column, self._blanks, self._word = 0, "", ""
        self._placed = self._has_words = False

    def _take(self, char: str) -> None:
        if not self._fence and (char == "\n" or char in _BLANKS or self._may_break_before(char)):
            self._end_word()
        if self._fence:
            self._take_code(char)
        elif char == "\n":
            self._out.append(char)
            self._begin_line()
        elif char in _BLANKS:
            self._blanks += char
        else:
            self._word += char
            if self._placed:
                self._out.append(char)
            elif self._is_decided():
                self._place()

    def _take_code(self, char: str) -> None:
        self._out.append(char)
        if char != "\n":
            self._code_line += char
            return
        line, self._code_line = self._code_line.strip(), ""
        if line.startswith(self._fence) and not line.strip(self._fence[0]):
            self._fence = ""
        self._begin_line()

    def _may_break_before(self, char: str) -> bool:
        return bool(self._word) and not self._may_be_fence() and _is_break(self._word[-1], char)

    def _may_be_fence(self) -> bool:
        begin = self._word[:3]
        return not self._has_words and begin in ("```"[: len(begin)], "~~~"[: len(begin)])

    def _is_decided(self) -> bool:
        """Whether it is known where the word goes, whatever its end is."""
        if not self._has_words:
            return not self._may_be_fence()
        return not self._fits()

    def _fits(self) -> bool:
        return _column_after(self._blanks, self._column) + _cells(self._word) <= self._columns()

    def _place(self) -> None:
        if self._has_words and not self._fits():
            self._out.append("\n")
            self._column = 0
        else:
            self._out.append(self._blanks)
            self._column = _column_after(self._blanks, self._column)
        self._out.append(self._word)
        self._blanks, self._placed = "", True

    def _end_word(self) -> None:
        if not self._word:
            return
        if not self._placed:
            self._place()
        if self._may_be_fence() and (fence := _FENCE.fullmatch(self._word)) is not None:
            self._fence = fence[1] or fence[2]
        end, width = self._column + _cells(self._word), max(1, self._columns())
        self._column = (end - 1) % width + 1 if end > width else end
        self._word, self._placed, self._has_words = "", False, True


def broken(text: str, columns: int) -> list[str]:
    """The lines of a text that is whole."""
    wrap = WordWrap(lambda: columns)
    return (wrap.feed(text) + wrap.rest()).split("\n")


def _is_break(before: str, char: str) -> bool:
    """Whether a line may end between these two, which no blank parts: beside a wide one, where no pair is torn."""
    if (before.isascii() and char.isascii()) or before == _JOINER or not _cells(char):
        return False
    if unicodedata.category(char) in _NO_BREAK_BEFORE or unicodedata.category(before) in _NO_BREAK_AFTER:
        return False
    return 2 in (_cells(before), _cells(char))


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # 40 ms, for the rarer text that is not ASCII

    return cell_len(text)


def _column_after(blanks: str, column: int) -> int:
    for blank in blanks:
        column = column + _TAB - column % _TAB if blank == "\t" else column + _cells(blank)
    return column
