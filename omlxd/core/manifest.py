"""The manifest as data: the daemon's settings, the API's, and the models, already checked and with defaults filled in.

`daemon/manifest_file.py` makes one from the TOML file; a program that embeds omlxd may make one by hand. Keys, types
and meanings are in omlxd.toml(5).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from omlxd.core.errors import InvalidRequest, UnknownModel
from omlxd.core.limits import GIB, Machine, MemoryLimits, auto_limit, resolve_limits
from omlxd.core.memory import Policy
from omlxd.core.states import LimitOrigin
from omlxd.core.units import parse_limit, parse_size
from omlxd.core.wording import nearest, shown

AUTO: Final = "auto"
NAME_RULE: Final = "letters, digits, `.`, `_`, `-` and `:`, at most 100, the first a letter or digit"
LISTEN_HINT: Final = 'write `"127.0.0.1:8321"`, `"[::1]:8321"`, or `"off"` for the Unix socket only'

# A name is a segment of a URL path and a word on the command line: no `/`, no `..`, nothing that looks like an option.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_LISTEN = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})", re.ASCII)


class Restore(StrEnum):
    """What is loaded at the start beside the manifest's own pins and preloads: nothing, what was pinned at run time, or
    also what was loaded when the daemon ended.
    """

    NONE = "none"
    PINNED = "pinned"
    LOADED = "loaded"

    @classmethod
    def chosen(cls, flag: str | None, manifest: str | None, *, restarted: bool) -> Restore:
        """The command line's word, else the manifest's; else a restart goes on with what was loaded."""
        return cls(flag or manifest or (cls.LOADED if restarted else cls.PINNED))


@dataclass(frozen=True)
class DaemonSettings:
    """The `[daemon]` table.

    Attributes:
        max_memory: the soft limit as written: `auto`, a size, a percentage, bytes; see `memory_limits`.
        hard_limit: the hard limit as written, or None for the one that follows from the soft limit.
        min_available: what other programs must leave the system, as written; None for what `min_available_bytes` says.
        poll_interval_s: seconds between two looks of the enforcer.
        policy: how pressure is answered.
        prefill_memory_guard: refuse a prefill that would pass the hard limit.
        drain_timeout_s: seconds that running requests get to finish when the daemon stops or a model is unloaded.
        load_timeout_s: seconds that a load may wait for memory that nobody gives back.
        fair_wait_s: seconds that a load may wait before models in use make way for it.
        park_deadline_s: seconds after which a parked request that does not fit again ends with the text it has.
        stall_timeout_s: seconds without a step, while there is work, after which health and the log call it a stall.
        prefill_chunk_tokens: tokens of one prefill step at most.
        max_batch: requests of one model that decode together.
        max_waiting: requests that may wait; one more is told to come back later.
        prefix_cache: what prefix caches may hold, as written: `auto`, a size, a percentage, bytes.
        restore: what is loaded at the start, as written; None for what `Restore.chosen` says.
        keep_awake: hold off the machine's idle sleep while requests are in flight (macOS).
        log_level: the least severe level that is logged.
        log_max_size_bytes: size at which the log file is rotated.
        log_backups: rotated log files that are kept.
    """

    max_memory: str | int = AUTO
    hard_limit: str | int | None = None
    min_available: str | int | None = None
    poll_interval_s: float = 1.0
    policy: Policy = Policy.GRACEFUL
    prefill_memory_guard: bool = True
    drain_timeout_s: float = 30.0
    load_timeout_s: float = 60.0
    park_deadline_s: float = 300.0
    fair_wait_s: float = 10.0
    stall_timeout_s: float = 60.0
    prefill_chunk_tokens: int = 256
    max_batch: int = 32
    max_waiting: int = 256
    prefix_cache: str | int = AUTO
    restore: str | None = None
    keep_awake: bool = True
    log_level: str = "info"
    log_max_size_bytes: int = 20 * 2**20
    log_backups: int = 5

    def memory_limits(self, machine: Machine, origin: LimitOrigin = LimitOrigin.MANIFEST) -> MemoryLimits:
        """The limits in force on this machine; raises InvalidRequest when `hard_limit` contradicts the rest.

        `origin` is who said what `max_memory` is, where these are not the manifest's own settings.
        """
        hard_bytes = None if self.hard_limit is None else parse_limit(self.hard_limit, ram_bytes=machine.ram_bytes)
        return resolve_limits(max_memory_bytes(self.max_memory, machine), hard_bytes, machine, origin)


@dataclass(frozen=True)
class ListenAddress:
    """Where the API listens on TCP; port 0 means any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host == "localhost" or _ip_is_loopback(self.host)


@dataclass(frozen=True)
class ApiSettings:
    """The `[api]` table.

    Attributes:
        listen: `host:port` as written; empty or `off` when the API answers on the Unix socket only.
        api_key: the bearer key that TCP clients must send; never shown.
        api_key_file: the file that holds it instead, absolute.
        allow_origins: web pages of these origins may use the API from a browser.
        max_keep_alive_s: seconds that a request may want its model kept at most; None for the model's own `ttl`.
    """

    listen: str = "127.0.0.1:8321"
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    allow_origins: tuple[str, ...] = ()
    max_keep_alive_s: float | None = None

    @property
    def address(self) -> ListenAddress | None:
        """The TCP address, or None when TCP is off."""
        return parse_listen(self.listen)


@dataclass(frozen=True)
class ModelSettings:
    """One `[models.NAME]` table; exactly one of `path` and `repo` is set.

    Attributes:
        name: what clients call it.
        path: the model folder, absolute.
        repo: `org/name` in the Hugging Face cache.
        pin: never unloaded by the enforcer.
        preload: loaded when the daemon starts.
        aliases: other names for it.
        ttl_s: seconds without a request after which it is unloaded, or None for never.
        max_context: tokens of prompt and answer together, or None for what the model allows.
    """

    name: str
    path: str | None = None
    repo: str | None = None
    pin: bool = False
    preload: bool = False
    aliases: tuple[str, ...] = ()
    ttl_s: float | None = None
    max_context: int | None = None


@dataclass(frozen=True)
class Manifest:
    """All of the file at `path`; `models` keeps the file's order."""

    daemon: DaemonSettings = DaemonSettings()
    api: ApiSettings = ApiSettings()
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    path: str = ""

    def model(self, name_or_alias: str) -> ModelSettings:
        """The model of this name or alias; raises UnknownModel with the nearest name as the hint."""
        for model in self.models.values():
            if name_or_alias == model.name or name_or_alias in model.aliases:
                return model
        near = nearest(name_or_alias, self.names())
        hint = f"did you mean `{near}`?" if near else "`omlxd models` lists the models of the manifest"
        raise UnknownModel(f"there is no model `{shown(name_or_alias)}` in the manifest", hint=hint)

    def names(self) -> tuple[str, ...]:
        """Every name a client may use: the models' own, then their aliases."""
        aliases = (alias for model in self.models.values() for alias in model.aliases)
        return (*self.models, *aliases)


def max_memory_bytes(max_memory: str | int, machine: Machine) -> int:
    """The soft limit in bytes that a written `max_memory` asks for on this machine; raises InvalidRequest."""
    if isinstance(max_memory, str) and max_memory.strip().lower() == AUTO:
        return auto_limit(machine)
    return parse_limit(max_memory, ram_bytes=machine.ram_bytes)


def prefix_cache_bytes(prefix_cache: str | int, machine: Machine) -> int | None:
    """What prefix caches may hold, in bytes; None for `auto`, which follows the limit. Raises InvalidRequest."""
    if isinstance(prefix_cache, str) and prefix_cache.strip().lower() == AUTO:
        return None
    return parse_size(prefix_cache, ram_bytes=machine.ram_bytes)


def min_available_bytes(min_available: str | int | None, machine: Machine, platform: str) -> int:
    """What other programs must leave the system, in bytes; raises InvalidRequest.

    Args:
        min_available: as written; by default 2 GiB on macOS, which slows down before it swaps, and 1 GiB elsewhere.
        platform: as `sys.platform` names it.
    """
    if min_available is None:
        return (2 if platform == "darwin" else 1) * GIB
    return parse_size(min_available, ram_bytes=machine.ram_bytes)


def parse_listen(text: str) -> ListenAddress | None:
    """The address in `host:port`, `[ipv6]:port`; None for `off` and the empty text; raises InvalidRequest."""
    text = text.strip()
    if text.lower() in ("", "off"):
        return None
    match = _LISTEN.fullmatch(text)
    if match is None or not (match["host"] or _is_ipv6(match["ipv6"])):
        raise InvalidRequest(f"`{shown(text)}` is not an address to listen on", hint=LISTEN_HINT)
    if int(match["port"]) > 65_535:
        raise InvalidRequest(f"port `{match['port']}` is out of range", hint="write a port from 0 to 65535")
    return ListenAddress(host=(match["host"] or match["ipv6"]).lower(), port=int(match["port"]))


def is_model_name(text: str) -> bool:
    """Whether the text may name a model (`NAME_RULE`)."""
    return _NAME.fullmatch(text) is not None


def _ip_is_loopback(host: str) -> bool:
    import ipaddress  # 4 ms, and the command line does not ask

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_ipv6(host: str | None) -> bool:
    import ipaddress

    try:
        return host is not None and ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
