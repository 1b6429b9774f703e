"""Tells the service manager how the daemon fares: systemd's notification socket, one datagram a message.

The protocol is small (sd_notify(3)): lines of `KEY=VALUE` to the socket in `NOTIFY_SOCKET`. Without it there is nobody
to tell, and nothing is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"
_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Who is told; with neither socket nor watchdog, nobody.

    Attributes:
        address: the path of the socket; one that begins with `@` is in the abstract namespace.
        watchdog_s: seconds without a sign of life after which we are killed, or None.
    """

    address: str | None = None
    watchdog_s: float | None = None

    def ready(self) -> None:
        """The sockets answer."""
        self.say("READY=1", f"MAINPID={os.getpid()}")

    def stopping(self, within_s: float) -> None:
        """It drains, and may take so long; the time in the unit does not cut it short."""
        self.say("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(within_s * _MICROSECONDS)}")

    def alive(self) -> None:
        """A sign of life for the watchdog."""
        self.say("WATCHDOG=1")

    def say(self, *lines: str) -> None:
        """Send the lines as one message; a manager that has gone away is no reason to stop."""
        if self.address is None:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as sender:
                sender.setblocking(False)  # a manager that does not read must not hold up the event loop
                sender.sendto("\n".join(lines).encode(), address)
        except OSError:
            pass


def take_service_manager(environ: MutableMapping[str, str]) -> ServiceManager:
    """Who started us, by the environment, from which it is taken: a child must not speak for the daemon."""
    address = environ.pop(SOCKET_VARIABLE, None)
    watchdog_s = _watchdog_s(environ)
    for name in (WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE):
        environ.pop(name, None)
    if not address or address[0] not in "/@":
        return ServiceManager()
    return ServiceManager(address, watchdog_s)


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    written, pid = environ.get(WATCHDOG_VARIABLE, ""), environ.get(WATCHDOG_PID_VARIABLE)
    if not written.isdecimal() or int(written) == 0 or (pid is not None and pid != str(os.getpid())):
        return None
    return int(written) / _MICROSECONDS
