"""`state.toml` on the disk: read once, written at each change; a damaged one is kept beside it, and told."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from omlxd.core.errors import StartFailed
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.saved_state import SavedState
from omlxd.daemon.atomic_write import try_writing, write_atomically
from omlxd.daemon.files import open_regular
from omlxd.daemon.state_text import parse_state, render_state, salvage

TRY_AGAIN_S: Final = 30.0
_MOST_DAMAGED = 9  # copies that are kept; the next one takes the place of the newest


def read_state(path: Path) -> SavedState:
    """What is saved there; nothing when there is none, or one that is no text, which is the daemon's to move aside."""
    try:
        return parse_state(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return SavedState()


class StateFile:
    """Reads the state once and writes each change.

    A write that fails is a warning, never an error to the caller, and is tried again each TRY_AGAIN_S.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        self.path = path
        self.state = SavedState()
        self.warnings: tuple[str, ...] = ()  # what whoever starts the daemon should know
        self._emit = emit
        self._writing = asyncio.Lock()
        self._written: SavedState | None = None
        self._told: str | None = None  # why the last write failed
        self._tasks: set[asyncio.Task[tuple[str, ...]]] = set()
        self._again: asyncio.TimerHandle | None = None

    def load(self) -> SavedState:
        """Read the file; what is damaged of it is left out and told, and the file is kept as `state.toml.damaged`."""
        self.state = SavedState()
        lost: tuple[str, ...] = ()
        try:
            with os.fdopen(open_regular(self.path, os.O_RDONLY), encoding="utf-8") as file:
                self.state, lost = salvage(file.read())
        except FileNotFoundError:
            pass
        except (OSError, StartFailed, ValueError) as error:  # UnicodeDecodeError is a ValueError
            lost = (str(error),)
        self._written = self.state
        if lost:
            self._set_aside("; ".join(lost))
        return self.state

    async def change(self, update: Callable[[SavedState], SavedState]) -> tuple[str, ...]:
        """Take a change over and write it; when this returns it is on the disk, or the answer is why it is not."""
        self.state = update(self.state)
        return await self.flush()

    async def flush(self) -> tuple[str, ...]:
        """Write what is not on the disk yet (a daemon that ends may have cut a change short), or say why it is not."""
        # A thread that writes cannot be cancelled, so nobody else may begin meanwhile.
        return await asyncio.shield(self._begin_writing())

    async def try_writing(self) -> None:
        """Look whether the disk takes a state at all, and add to `warnings` when it does not."""
        async with self._writing:
            try:
                await asyncio.to_thread(try_writing, self.path, render_state(self.state))
            except OSError as error:
                self.warnings = (*self.warnings, f"nothing can be saved: {self._tell(error)}")

    @property
    def limit_saved(self) -> bool:
        """Whether the next daemon will find the limit that was set at run time."""
        return self._written is not None and self.state.limit == self._written.limit

    async def unsaved(self) -> str | None:
        """What the user has set and one more try cannot write: `the limit and pins: No space left on device`."""
        if not await self.flush():
            return None
        pins_saved = self._written is not None and self.state.pins == self._written.pins
        words = [word for word, saved in (("the limit", self.limit_saved), ("pins", pins_saved)) if not saved]
        return f"{' and '.join(words)}: {self._told}" if words else None

    def _begin_writing(self) -> asyncio.Task[tuple[str, ...]]:
        writing = asyncio.create_task(self._write())
        self._tasks.add(writing)
        writing.add_done_callback(self._tasks.discard)
        return writing

    def _try_again(self) -> None:
        self._again = None
        self._begin_writing()

    async def _write(self) -> tuple[str, ...]:
        async with self._writing:  # whoever comes second writes the newest state, in order
            if (state := self.state) == self._written:
                return ()
            try:
                await asyncio.to_thread(write_atomically, self.path, render_state(state))
                self._written, self._told = state, None
            except OSError as error:
                if self._again is None:
                    self._again = asyncio.get_running_loop().call_later(TRY_AGAIN_S, self._try_again)
                return (f"in force, but not saved: {self._tell(error)}",)
        return ()

    def _tell(self, error: OSError) -> str:
        """Why it was not written; an event only when that is news, and not for each load on a full disk."""
        reason = error.strerror or type(error).__name__
        if reason != self._told:
            self._told, fields = reason, {"path": str(self.path), "reason": reason}
            self._emit(Event(EventName.STATE_FILE_NOT_SAVED, level=EventLevel.WARNING, fields=fields))
        return reason

    def _set_aside(self, reason: str) -> None:
        """Keep the damaged file, write anew what could be read of it, and tell both."""
        kept = self.state != SavedState()
        fields = {"path": str(self.path), "reason": reason, "kept": kept}
        try:
            fields["moved_to"] = str(_moved(self.path, copy=kept))
        except OSError as error:
            fields["not_moved"] = error.strerror or type(error).__name__
        if kept:
            try:
                write_atomically(self.path, render_state(self.state))
            except OSError:
                self._written = None  # the damaged file stands as it was; the next change tries again
        self._emit(Event(EventName.STATE_FILE_DAMAGED, level=EventLevel.WARNING, fields=fields))
        where = f"it is kept as `{fields['moved_to']}`" if "moved_to" in fields else "it is where it was"
        self.warnings = (
            *self.warnings,
            f"`{self.path}` is damaged, {where}; {'the rest of it holds' if kept else 'nothing of it holds'}: {reason}",
        )


def _moved(path: Path, *, copy: bool) -> Path:
    """Give the file another name that is free, so that an older damaged one stays; `copy` keeps this name too."""
    names = [f"{path.name}.damaged", *(f"{path.name}.damaged-{number}" for number in range(2, _MOST_DAMAGED + 1))]
    for aside in map(path.with_name, names):
        if copy and aside.exists() and aside.samefile(path):
            return aside  # from an earlier start, which could not write it anew
        if not os.path.lexists(aside):
            break
    if copy:
        with contextlib.suppress(OSError):  # a file system without hard links
            aside.unlink(missing_ok=True)
            os.link(path, aside)
            return aside
    return path.replace(aside)
