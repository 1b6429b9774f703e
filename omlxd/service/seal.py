"""A line with a digest in the files we write, by which a later install sees whether somebody has edited them."""

from __future__ import annotations

import hashlib

_MARK = "written by `omlxd service install`, which replaces it only while unedited; sha256 "


def sealed(text: str, *, at_line: int, opening: str, closing: str = "") -> str:
    """The text with the digest of all other lines in a comment.

    Args:
        text: what the file says.
        at_line: how many lines stay above the comment.
        opening, closing: what makes a line a comment.
    """
    lines = text.splitlines(keepends=True)
    lines.insert(at_line, f"{opening}{_MARK}{_digest(text)}{closing}\n")
    return "".join(lines)


def is_unedited(text: str) -> bool:
    """Whether this is, to the letter, what some `sealed` returned."""
    lines = text.splitlines(keepends=True)
    marks = [line for line in lines if _MARK in line]
    return len(marks) == 1 and _digest("".join(line for line in lines if line not in marks)) in marks[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
