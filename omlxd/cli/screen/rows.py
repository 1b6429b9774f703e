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


class Rows:
    """A table with a heading and, below some of its rows, a line of their own.

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
        notes: Sequence[Text | None],
        selected: int | None,
    ) -> None:
        self._columns = columns
        self._rows = list(rows)
        self._notes = notes
        self._selected = selected

    @property
    def height(self) -> int:
        """Lines that it takes when all is shown."""
        return 1 + len(self._rows) + sum(note is not None for note in self._notes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or self.height
        whole = options.update(width=width, height=None, no_wrap=True)
        first, last = self._window(height - 1)
        heading, *rows = console.render_lines(self._table(width, first, last), whole)
        shown = [heading]
        for at, row in zip(range(first, last), rows, strict=True):
            shown.append(row)
            if (note := self._notes[at]) is not None:
                shown += console.render_lines(note, whole)[:1]
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
            cells = [_one_line(row[at]) for at in kept]
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


def _one_line(cell: str | Text) -> Text:
    text = cell.copy() if isinstance(cell, Text) else Text(cell)
    text.no_wrap, text.overflow = True, "ellipsis" if plain("…") == "…" else "crop"
    return text


def _left_out(above: int, below: int) -> str:
    parts = [f"{above} more above"] if above else []
    parts += [f"{below} more{' below' if above else ''}"] if below else []
    return plain(f"  … {', '.join(parts)}") if parts else ""
