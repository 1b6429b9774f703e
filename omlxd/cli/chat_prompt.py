"""The chat's line editor: several lines, a history in the home, Tab for commands and models (prompt_toolkit)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from omlxd.cli import output
from omlxd.cli.conversation import is_complete
from omlxd.core.errors import OmlxError
from omlxd.daemon.files import open_regular
from omlxd.daemon.home import Home

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT: Final = ">>> "
CONTINUED: Final = "... "
_LARGEST_HISTORY_BYTES: Final = 2**20
_ENTRY: Final = b"\n# "  # how prompt_toolkit begins an entry, with its time


class Prompt:
    """Reads what is typed, one question or command at a time.

    Args:
        home: whose `chat_history` keeps what was typed.
        complete: the words that may stand for the last one, of all that was typed before the cursor.
    """

    def __init__(self, home: Home, complete: Callable[[str], Iterable[str]]) -> None:
        # 250 ms of imports, for this one command
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import CompleteEvent, Completer, Completion
        from prompt_toolkit.document import Document

        class Words(Completer):
            def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
                before = document.text_before_cursor
                length = len(before) - max(before.rfind(" "), before.rfind("\n")) - 1
                return (Completion(word, start_position=-length) for word in complete(before))

        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUED,
            history=_history(home),
            key_bindings=_keys(),
            completer=Words(),
            complete_while_typing=False,
            enable_suspend=True,
        )

    def read(self) -> str:
        """What was typed, as it was.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C; its argument tells whether something had been typed.
        """
        try:
            return self._session.prompt()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._session.default_buffer.text) from None

    def leave(self, status: int) -> None:
        """From a signal's handler: end the program; while it reads, only once the terminal is as it was before."""
        app = self._session.app
        if not app.is_running or app.loop is None:
            raise SystemExit(status)
        app.loop.call_soon_threadsafe(lambda: app.is_done or app.exit(exception=SystemExit(status)))


def _keys() -> KeyBindings:
    """Enter sends, unless the text goes on; Alt-Enter begins another line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_complete(buffer.text):
            buffer.validate_and_handle()
            return
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
        buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _history(home: Home) -> History:
    """The file in the home, readable by its owner alone; what was typed lives only as long as the chat without it."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = home.chat_history
    try:
        os.close(open_regular(path, os.O_RDWR | os.O_CREAT))
        path.chmod(0o600)
        if path.stat().st_size > _LARGEST_HISTORY_BYTES:
            _shorten(home)
        return FileHistory(path)
    except (OSError, OmlxError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        output.warn(f"what you type is not kept: `{path}` cannot be written ({reason})")
        return InMemoryHistory()


def _shorten(home: Home) -> None:
    """Keep the newer half, from the beginning of an entry."""
    kept = home.chat_history.read_bytes()[-_LARGEST_HISTORY_BYTES // 2 :]
    shorter = home.chat_history.with_suffix(".new")
    with os.fdopen(os.open(shorter, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(kept[max(0, kept.find(_ENTRY)) :])
    shorter.replace(home.chat_history)


@contextmanager
def unechoed() -> Iterator[None]:
    """What is typed while an answer streams is not mixed into it; it waits for the next prompt, Ctrl-D as well."""
    import termios

    try:
        before: list[Any] = termios.tcgetattr(sys.stdin)
        silent = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
        termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    except (termios.error, OSError, ValueError):
        yield  # not a terminal that can be told
        return
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
