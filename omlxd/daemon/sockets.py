"""The two listening sockets and the directory that guards the private one.

We bind both ourselves: uvicorn's own Unix socket takes over live paths and is open to everybody.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
from pathlib import Path

from omlxd.core.errors import NotPermitted, OmlxError, StartFailed
from omlxd.core.manifest import ListenAddress
from omlxd.daemon.files import cannot_write, make_directory
from omlxd.daemon.home import MAX_SOCKET_PATH_BYTES, Home

_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1  # macOS: <sys/un.h>
_OURS = ("omlxd.", "state.toml")
_OUR_DIRECTORIES = frozenset({"logs", "demo", "models"})


def prepare_home(home: Home) -> None:
    """Make the home and its `logs`, private to the user.

    Raises:
        StartFailed: one cannot be made, or others can look into it and it holds more than our files.
        NotPermitted: it is another user's.
    """
    make_directory(home.root)
    _make_private(home.root)
    make_directory(home.logs)


def bind_unix(path: Path) -> socket.socket:
    """The control socket, mode 0600 from its first instant; call it only while holding the home's lock.

    Raises:
        StartFailed: the path is too long, or something that is not a socket is in the way.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise StartFailed(
            f"the socket path `{path}` has {length} bytes; the system takes {MAX_SOCKET_PATH_BYTES}",
            hint="set `OMLXD_HOME` to a shorter path",
            details={"length_bytes": length, "most_bytes": MAX_SOCKET_PATH_BYTES},
        )
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        bound.bind(os.fspath(path))
    except OSError as error:
        bound.close()
        raise StartFailed(f"the socket `{path}` cannot be made ({error.strerror})") from None
    finally:
        os.umask(before)
    return bound


def remove_socket(path: Path) -> None:
    """Take the socket file away at the end, while the lock is still held; never anything that is not a socket."""
    try:
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    except OSError:
        pass  # gone already, or the directory is: nothing of ours is left behind


def bind_tcp(listen: ListenAddress, *, manifest: Path) -> socket.socket:
    """The OpenAI-style API's socket.

    Args:
        listen: host and port; port 0 takes a free one.
        manifest: the file whose `api.listen` to change, for the hint.

    Raises:
        StartFailed: the port is taken, or the address is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise _cannot_listen(listen, manifest, f"`{listen.host}` is no address of this machine") from error
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(128)  # here and not later: only now is a port that somebody else listens on refused for sure
    except (OSError, OverflowError) as error:
        bound.close()
        raise _cannot_listen(listen, manifest, _why(error)) from None
    return bound


def peer_uid(connection: socket.socket) -> int | None:
    """The user at the other end of a Unix socket; None where the system does not say."""
    try:
        if sys.platform == "linux":
            _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(uid)
        if sys.platform == "darwin":
            # struct xucred: version, uid, then the groups
            _, uid = struct.unpack_from("II", connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76))
            return int(uid)
    except OSError:
        pass
    return None


def may_connect(connection: socket.socket) -> bool:
    """Whether the peer is this user or root; where the system cannot say, the mode 0600 stands alone."""
    uid = peer_uid(connection)
    return uid is None or uid in (os.geteuid(), 0)


def written(listen: ListenAddress, port: int | None = None) -> str:
    """The address as `host:port`, with the port that was really bound when it is given."""
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{host}:{listen.port if port is None else port}"


def _make_private(root: Path) -> None:
    found = root.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartFailed(f"the home `{root}` is not a directory", hint="name another with `--home` or `OMLXD_HOME`")
    if found.st_uid != os.geteuid():
        raise NotPermitted(
            f"the home directory `{root}` belongs to another user", hint="name another with `--home` or `OMLXD_HOME`"
        )
    if not found.st_mode & 0o077:
        return
    # Ours alone: close it quietly. With anything else inside (`--home ~`, `--home /tmp`) that is for the user to say.
    if all(entry.name.startswith(_OURS) or entry.name in _OUR_DIRECTORIES for entry in root.iterdir()):
        try:
            root.chmod(0o700)
        except OSError as error:
            raise cannot_write(error, root) from None
        return
    raise StartFailed(
        f"the home directory `{root}` is open to other users and holds other files",
        hint=f"`chmod 700 {root}`, or name a directory of its own with `--home` or `OMLXD_HOME`",
    )


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartFailed(
            f"`{path}` is in the way: it is not a socket",
            hint="move it away; omlxd does not remove what is not its own",
        )
    path.unlink()  # nobody listens there: whoever did would hold the lock that we hold


def _why(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return "the port is not between 0 and 65535"
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return "the port is taken"
    if number == errno.EADDRNOTAVAIL:
        return "the address is none of this machine's"
    if number == errno.EACCES:
        return "the system does not permit this port"
    return str(getattr(error, "strerror", None) or error)


def _cannot_listen(listen: ListenAddress, manifest: Path, why: str) -> OmlxError:
    return StartFailed(
        f"cannot listen on `{written(listen)}`: {why}",
        hint=f"change `api.listen` in `{manifest}`, or stop what listens there",
        details={"listen": written(listen)},
    )
