"""What the keys of the screen have done by the daemon, each in a thread of its own: some take a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import quote

from omlxd.cli.client import Client, model_path
from omlxd.cli.screen.state import Wish
from omlxd.cli.values import named
from omlxd.core.errors import OmlxError
from omlxd.core.units import format_bytes, format_duration


def begin(client: Client, wish: Wish, tell: Callable[[str], None]) -> None:
    """Have it done; `tell` is called from another thread with what came of it."""

    def work() -> None:
        try:
            tell(do(client, wish))
        except OmlxError as error:
            tell(f"{error.message}; {error.hint}" if error.hint else error.message)
        except OSError as error:
            tell(f"the daemon could not be asked: {error}")

    threading.Thread(target=work, name=f"omlxd-{wish.verb}", daemon=True).start()


def do(client: Client, wish: Wish) -> str:
    """Have it done, and wait for its effect; what came of it in words, or the daemon's error raised."""
    if wish.verb == "abort":
        client.call("DELETE", f"/v1/control/requests/{quote(wish.name, safe='')}")
        return f"request {named(wish.name)} aborted"
    answer = client.call("POST", model_path(wish.name, wish.verb), {}, timeout_s=None)
    said = _said(wish, answer)
    return "; ".join([said, *map(str, answer.get("warnings") or ())])


def _said(wish: Wish, answer: dict[str, object]) -> str:
    name = named(wish.name)
    if wish.verb == "load":
        load_s = answer.get("load_s")
        return f"loaded {name} in {format_duration(load_s)}" if isinstance(load_s, float) else f"{name} is loaded"
    if wish.verb == "unload":
        was, freed_bytes = answer.get("was"), answer.get("freed_bytes")
        if was == "unloaded":
            return f"{name} was not loaded"
        did = "cancelled the load of" if was == "loading" else "unloaded"
        return f"{did} {name} ({format_bytes(freed_bytes if isinstance(freed_bytes, int) else 0)} freed)"
    return f"{wish.verb}ned {name}"
