"""A table of which as many rows are shown as there is room for, the selected one always, and how many are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from omlxd.cli.cells import plain


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        from_width: the narrowest screen that has it, in columns of the terminal.
        right: whether its values stand at the right.
        gives_way: whether it is what gets shorter when it is narrow.
    """

    title: str
    from_width: int = 0
    right: bool = False
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """What stands below a row: its lines, of which all but the first may be left out, and their style."""

    lines: Sequence[str]
    style: str

    def shown(self, room: int) -> list[Text]:
        """It in so many lines."""
        return [Text(line, style=self.style) for line in shortened(self.lines, room)]


def shortened(lines: Sequence[str], room: int) -> list[str]:
    """At most so many lines, at least one; the last one has all the rest, to be cut off where the screen ends."""
    kept = max(0, room - 1)
    rest = " ".join([*lines[kept : kept + 1], *map(str.strip, lines[kept + 1 :])])
    return [*lines[:kept], rest] if rest else list(lines[:kept])


class Rows:
    """A table with a heading and, below some of its rows, a note.

    Where there is no room for all of it a note is one line; where there is none for that, rows are left out.

    Args:
        columns: all there are; those that are too much for the width are left out.
        rows: a cell for each of all columns.
        notes: what stands below each row, or None.
        selected: the number of the selected row, or None.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Iterable[Sequence[str | Text]],
        notes: Sequence[Note | None],
        selected: int | None,
    ) -> None:
        self._columns = columns
        self._rows = list(rows)
        self._notes = notes
        self._selected = selected

    @property
    def height(self) -> int:
        """Lines that it takes when all is shown."""
        return 1 + len(self._rows) + sum(len(note.lines) for note in self._notes if note is not None)

    @property
    def least_height(self) -> int:
        """Lines that it takes when no row is left out."""
        return 1 + len(self._rows) + sum(note is not None for note in self._notes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or self.height
        spare = max(0, height - self.least_height)
        whole = options.update(width=width, height=None, no_wrap=True)
        first, last = self._window(height - 1)
        heading, *rows = console.render_lines(self._table(width, first, last), whole)
        shown = [heading]
        for at, row in zip(range(first, last), rows, strict=True):
            shown.append(row)
            if (note := self._notes[at]) is not None:
                lines = note.shown(1 + spare)
                spare -= len(lines) - 1
                shown += [console.render_lines(one_line(line), whole)[0] for line in lines]
        if left_out := _left_out(first, len(self._rows) - last):
            shown += console.render_lines(Text(left_out, style="dim"), whole)[:1]
        for line in shown[:height]:
            yield from line
            yield Segment.line()

    def _table(self, width: int, first: int, last: int) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=True)
        kept = [at for at, column in enumerate(self._columns) if width >= column.from_width]
        table.add_column(Text(" "), no_wrap=True)
        for column in (self._columns[at] for at in kept):
            table.add_column(
                Text(column.title, no_wrap=True),
                justify="right" if column.right else "left",
                no_wrap=not column.gives_way,
                min_width=4 if column.gives_way else None,
            )
        table.add_column("", ratio=1)  # takes what is left, so that a selected row is one to the edge
        mark = plain("›")
        for number in range(first, last):
            row, chosen = self._rows[number], number == self._selected
            cells = [one_line(row[at]) for at in kept]
            if chosen:  # one colour: reversed ones would be a patchwork
                cells = [Text(cell.plain, no_wrap=True, overflow=cell.overflow) for cell in cells]
            table.add_row(mark if chosen else " ", *cells, "", style="reverse" if chosen else "")
        return table

    def _window(self, room: int) -> tuple[int, int]:
        """The first row that is shown and the one after the last, in so many lines."""
        heights = [2 if note is not None else 1 for note in self._notes]
        if sum(heights) <= room:
            return 0, len(heights)
        room -= 1  # for how many are left out
        for first in range(len(heights)):
            last, used = first, 0
            while last < len(heights) and used + heights[last] <= room:
                used += heights[last]
                last += 1
            if self._selected is None or self._selected < max(last, first + 1):
                return first, last
        return 0, 0


def one_line(cell: str | Text) -> Text:
    """It without a break, cut where its room ends."""
    text = cell.copy() if isinstance(cell, Text) else Text(cell)
    text.no_wrap, text.overflow = True, "ellipsis" if plain("…") == "…" else "crop"
    return text


def _left_out(above: int, below: int) -> str:
    parts = [f"{above} more above"] if above else []
    parts += [f"{below} more{' below' if above else ''}"] if below else []
    return plain(f"  … {', '.join(parts)}") if parts else ""
