"""Looks at the installation, manifest, models and home for `omlxd doctor`; loads nothing and changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omlxd.core.checkup import (
    EMPTIED_REMEDY,
    SOCKET_ALONE,
    Finding,
    judge_address,
    judge_clock,
    judge_device,
    judge_disk,
    judge_limits,
    judge_limits_in_force,
    judge_lock,
    judge_logs,
    judge_promised,
    judge_stale,
    judge_version,
    warning,
    well,
    wrong,
)
from omlxd.core.errors import InvalidRequest, ManifestInvalid, OmlxError, StartFailed
from omlxd.core.limits import Machine, MemoryLimits
from omlxd.core.manifest import DaemonSettings, Manifest
from omlxd.core.saved_state import SavedState
from omlxd.core.states import LimitOrigin
from omlxd.daemon.api_key import api_key_of
from omlxd.daemon.home import MAX_SOCKET_PATH_BYTES, Home
from omlxd.daemon.machine import find_machine
from omlxd.daemon.manifest_file import read_manifest
from omlxd.daemon.model_check import check_models
from omlxd.daemon.sockets import bind_tcp, written
from omlxd.engine import blas
from omlxd.engine.backends import detect_backend
from omlxd.engine.orders import MIB

BESIDE_THE_LOG_BYTES = 4 * MIB  # `daemon.err` and its predecessor, and the line that a rotation waits for


def check_installation() -> tuple[list[Finding], Machine]:
    """MLX's versions and backend, and the machine with what the device allows."""
    found = [judge_version(package, _version(package)) for package in ("mlx", "mlx-lm")]
    try:
        backend = detect_backend()
        machine, wired_bytes = find_machine(backend.device_cap()), backend.wired_limit_bytes()
    except OmlxError as error:
        return [*found, wrong("backend", error.message, error.hint or "install MLX")], find_machine()
    except Exception as error:  # a driver that does not answer is a finding and no end of the examination
        return [*found, wrong("backend", f"it does not answer ({error})", "look at the driver")], find_machine()
    found += [well("backend", backend.name), *([_blas()] if backend.name == "cpu" else [])]
    return [*found, judge_device(machine, wired_bytes)], machine


def _blas() -> Finding:
    if not blas.is_wanted():
        return well("blas", f"MLX's own, by {blas.VARIABLE}")
    if blas.has_openblas():
        return well("blas", "the system's OpenBLAS")
    found = "MLX's own, on one core: float32 models are several times slower than with OpenBLAS"
    return warning("blas", found, "install it (Debian, Ubuntu: `apt install libopenblas0-pthread`)")


@dataclass(frozen=True, slots=True)
class InForce:
    """What a daemon that runs goes by.

    Attributes:
        manifest: the file it was started with.
        limits: of its memory.
        api: where it listens, as `host:port`; None for the Unix socket alone.
        models: how many it has.
    """

    manifest: Path
    limits: MemoryLimits
    api: str | None
    models: int


def check_manifest(
    path: Path, machine: Machine, saved: SavedState, *, running: bool, in_force: InForce | None = None
) -> tuple[list[Finding], DaemonSettings]:
    """The manifest, the limits that follow from it, each model's files, and the API's key and port.

    Args:
        path: of the manifest.
        machine: what the limits follow from.
        saved: what was set while a daemon ran.
        running: whether a daemon runs, which then has the port.
        in_force: what that one goes by, when it answers; another manifest than its own is not compared with it.

    Returns:
        What was found, and the manifest's settings, or the defaults.
    """
    in_force = in_force if in_force is not None and in_force.manifest == path else None
    try:
        manifest = read_manifest(path)
        limits, origin = _limits(manifest.daemon, machine, saved, saved.start if running else {})
    except ManifestInvalid as error:
        problems = "; ".join(error.problems)
        finding = wrong(
            "manifest", f"{error.message}{f': {problems}' if problems else ''}", error.hint or "`omlxd check`"
        )
        return [finding], DaemonSettings()
    except OmlxError as error:
        return [wrong("manifest", error.message, error.hint or "`omlxd check`")], DaemonSettings()
    models_gone = in_force.models if in_force is not None and not manifest.models else 0
    if in_force is None:
        judged = judge_limits(limits, machine)
    else:
        judged = judge_limits_in_force(in_force.limits, limits, machine, emptied=models_gone > 0)
    models = _models(manifest, saved, limits.soft_bytes, models_gone)
    found = [well("manifest", manifest.path), _from(judged, origin), *models]
    return [*found, _api(manifest, running, in_force)], manifest.daemon


def _limits(
    settings: DaemonSettings, machine: Machine, saved: SavedState, start: Mapping[str, str]
) -> tuple[MemoryLimits, str | None]:
    """The limits that a start with these options takes, and where they come from if not from the manifest."""
    written = str(settings.max_memory)
    settings = replace(settings, hard_limit=start.get("hard_limit", settings.hard_limit))
    if (told := start.get("max_memory")) is not None:
        limits = replace(settings, max_memory=told).memory_limits(machine, LimitOrigin.COMMAND_LINE)
        return limits, f"set by `--max-memory`; the manifest says `{written}`"
    if (origin := saved.limit_origin(written)) is not None:
        try:
            kept = replace(settings, max_memory=saved.max_memory(written) or written)
            return kept.memory_limits(machine, LimitOrigin.LIMIT), origin
        except InvalidRequest:
            pass  # a start leaves it then too
    return settings.memory_limits(machine), None


def _from(finding: Finding, origin: str | None) -> Finding:
    return finding if origin is None else replace(finding, found=f"{finding.found}, {origin}")


def check_home(home: Home, settings: DaemonSettings, *, running: bool, pid: int | None) -> list[Finding]:
    """The directory, the lock, the socket's place, the disk, the logs, what was left over, and the clock.

    Args:
        home: what is looked at.
        settings: the manifest's, or the defaults.
        running: whether somebody holds the lock.
        pid: the number in it then, or None when there is none.
    """
    if not home.root.exists():
        return [warning("home", f"`{home.root}` does not exist yet", "`omlxd init`"), judge_clock(time.time(), 0.0)]
    most_bytes = settings.log_max_size_bytes * (settings.log_backups + 1) + BESIDE_THE_LOG_BYTES
    stale = [] if running else [home.state.with_name(f"{home.state.name}.new")]
    stale += sorted(home.root.glob(f"{home.state.name}.damaged*"))
    checks: Sequence[tuple[str, Callable[[], Finding]]] = (
        ("home", lambda: _home(home.root)),
        ("lock", lambda: _lock(home.lock, running, pid)),
        ("socket", lambda: _socket(home.socket, running)),
        ("disk", lambda: judge_disk(shutil.disk_usage(home.root).free)),
        ("logs", lambda: judge_logs(sum(_sizes(home.logs)), most_bytes)),
        ("files", lambda: judge_stale([path.name for path in stale if path.exists()])),
        ("clock", lambda: judge_clock(time.time(), home.log.stat().st_mtime if home.log.exists() else 0.0)),
    )
    found = []
    for name, check in checks:
        try:
            found.append(check())
        except OSError as error:
            found.append(wrong(name, f"`{error.filename}`: {error.strerror}", "look at its kind, owner and mode"))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _api(manifest: Manifest, running: bool, in_force: InForce | None) -> Finding:
    """Whether a start finds the API's key, and its port free; what the daemon that runs has, it gives back."""
    listen = manifest.api.address
    if listen is None:
        return well("api", SOCKET_ALONE) if in_force is None else judge_address(in_force.api, None, False)
    port = None if in_force is None or in_force.api is None else int(in_force.api.rpartition(":")[2])
    try:
        key = api_key_of(manifest.api)
        if not running or (in_force is not None and listen.port not in (0, port)):
            bind_tcp(listen, manifest=Path(manifest.path)).close()
    except StartFailed as error:
        meanwhile = f"; the daemon that runs listens at {in_force.api}" if in_force and in_force.api else ""
        return wrong("api", f"{error.message}{meanwhile}", error.hint or "`omlxd check`")
    asked = written(listen, listen.port or port)
    return judge_address(asked if in_force is None else in_force.api, asked, key is not None)


def _models(manifest: Manifest, saved: SavedState, soft_bytes: int, models_gone: int) -> Iterator[Finding]:
    reports = check_models(manifest, soft_bytes)
    pinned_bytes = preloaded_bytes = 0
    for report in reports:
        settings = manifest.models[report.name]
        for problem in report.problems:
            what, _, remedy = problem.partition("; ")
            yield wrong("model", f"`{report.name}`: {what}", remedy or "`omlxd check`")
        if saved.pinned(report.name, settings.pin):
            pinned_bytes += report.weights_bytes or 0
        elif settings.preload:
            preloaded_bytes += report.weights_bytes or 0
    if models_gone:
        yield warning("model", f"the manifest has none, and the daemon that runs has {models_gone}", EMPTIED_REMEDY)
    elif not reports:
        yield warning("model", "the manifest has none", "`omlxd find` shows what is here, `omlxd add` adds it")
    elif not any(report.problems for report in reports):
        yield well("model", f"{len(reports)} can be loaded")
    yield _from(judge_promised(pinned_bytes, preloaded_bytes, soft_bytes), saved.pins_origin(manifest))


def _home(root: Path) -> Finding:
    seen = root.stat()
    if seen.st_uid != os.geteuid():
        return wrong("home", f"`{root}` belongs to another user", "name another with `--home` or `OMLXD_HOME`")
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        return wrong("home", f"`{root}` is on a file system that is read-only", "mount it anew, or name another home")
    if not stat.S_ISDIR(seen.st_mode) or not os.access(root, os.W_OK | os.X_OK):
        return wrong("home", f"`{root}` is no directory that can be written to", f"`chmod 700 '{root}'`")
    if seen.st_mode & 0o077:
        return wrong("home", f"others can look into `{root}`", f"`chmod 700 '{root}'`")
    return well("home", str(root))


def _lock(path: Path, running: bool, pid: int | None) -> Finding:
    if os.path.lexists(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            return wrong("lock", f"`{path}` is in the way: it is no regular file", "move it away")
        if not os.access(path, os.R_OK | os.W_OK):
            return wrong("lock", f"`{path}` may not be opened", f"`chmod 600 '{path}'`")
    return judge_lock(running, pid)


def _socket(path: Path, running: bool) -> Finding:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        return wrong(
            "socket", f"its path has {length} bytes, and the system takes {MAX_SOCKET_PATH_BYTES}", "a shorter home"
        )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if running:
            return wrong("socket", "it was removed under the daemon", "`omlxd restart`")
        return well("socket", "none, as nothing runs")
    if not stat.S_ISSOCK(mode):
        return wrong("socket", f"`{path}` is in the way: it is no socket", "move it away")
    if mode & 0o077:
        return wrong("socket", "others may open it", f"`chmod 600 '{path}'`")
    return well("socket", "private" if running else "left by a daemon that was killed; the next one replaces it")


def _sizes(folder: Path) -> Iterator[int]:
    if folder.exists():
        for path in folder.iterdir():
            yield path.lstat().st_size
