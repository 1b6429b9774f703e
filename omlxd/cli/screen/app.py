"""The loop of the screen: what was seen and typed goes into its state, and the state is drawn."""

from __future__ import annotations

import queue
import time
from typing import Final

from omlxd.cli.client import Client
from omlxd.cli.render import screen_console
from omlxd.cli.screen import deeds
from omlxd.cli.screen.feed import Feed, Look, read_status
from omlxd.cli.screen.page import page
from omlxd.cli.screen.state import ScreenState
from omlxd.cli.screen.terminal import FullScreen
from omlxd.core.errors import OmlxError

REPAINT_S: Final = 2.0  # looks come each second; a daemon that does not answer gives none


def watch(client: Client) -> int:
    """Show the status until the user has seen enough; the signal that ended it, or 0.

    Raises:
        OmlxError: there was no daemon when it began, or what answers later is not one that is understood.
    """
    state, news = ScreenState(time.monotonic), queue.SimpleQueue[Look | str]()
    status = read_status(client)  # or there is nothing to show, and the error goes where errors go
    _remember(client, state)
    state.see(Look(status))
    with FullScreen(screen_console()) as screen:

        def tell(what: Look | str) -> None:
            news.put(what)
            screen.tell()

        with Feed(client, tell) as feed:
            while not state.quits and feed.failure is None:
                screen.paint(page(state, *screen.size))
                heard = screen.wait(REPAINT_S)
                if heard.end is not None:
                    return heard.end
                for key in heard.keys:
                    if (wish := state.press(key)) is not None:
                        state.tell(f"{wish.verb} {wish.name}…")
                        deeds.begin(client, wish, tell)
                while not news.empty():
                    _take(state, feed, news.get())
    if feed.failure is not None:
        raise feed.failure
    return 0


def _remember(client: Client, state: ScreenState) -> None:
    """What was before; a daemon of an older version may not tell."""
    try:
        told = client.get("/v1/control/history")
        state.history.begin(state.clock(), told["ages_s"], told["used"])
    except (OmlxError, KeyError):
        pass


def _take(state: ScreenState, feed: Feed, what: Look | str) -> None:
    if isinstance(what, Look):
        state.see(what)
    else:
        state.tell(what)
        feed.look_now()
