"""The manifest's keys as pydantic models, and pydantic's findings as sentences.

Defaults stand here as a user would write them; omlxd.toml(5) and the template of `omlxd init` are held to these
models by tests. Values come out as the dataclasses of `core/manifest.py` want them: seconds, bytes, absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from omlxd.core.errors import InvalidRequest
from omlxd.core.manifest import AUTO, NAME_RULE, is_model_name, parse_listen
from omlxd.core.memory import Policy
from omlxd.core.units import MAX_DURATION_S, format_bytes, format_duration, parse_duration, parse_limit, parse_size
from omlxd.core.wording import Location, dotted, nearest, shown
from omlxd.daemon.api_key import KEY_RULE, is_api_key

_ANY_RAM_BYTES: Final = 2**40  # a percentage is only checked here; the machine's memory comes in later
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ORIGIN = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?")


def _says(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("omlxd", "{sentence}", {"sentence": sentence})


def _checked(parse: Callable[[Any], Any]) -> PlainValidator:
    """A validator that lets the core's own parser speak."""

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except InvalidRequest as problem:
            raise _says(f"{problem.message}; {problem.hint}" if problem.hint else problem.message) from None

    return PlainValidator(validate)


def _written_size(value: Any) -> Any:
    parse_size(value, ram_bytes=_ANY_RAM_BYTES)
    return value


def _written_limit(value: Any) -> Any:
    parse_limit(value, ram_bytes=_ANY_RAM_BYTES)
    return value


def _limit_or_auto(value: Any) -> Any:
    return AUTO if isinstance(value, str) and value.strip().lower() == AUTO else _written_limit(value)


def _size_or_auto(value: Any) -> Any:
    return AUTO if isinstance(value, str) and value.strip().lower() == AUTO else _written_size(value)


def _bytes_between(low: int, high: int) -> PlainValidator:
    def parse(value: Any) -> int:
        size_bytes = parse_size(value)
        if not low <= size_bytes <= high:
            raise InvalidRequest(f"must be between {format_bytes(low)} and {format_bytes(high)}", hint="")
        return size_bytes

    return _checked(parse)


def _seconds_between(low: float, high: float) -> PlainValidator:
    def parse(value: Any) -> float:
        duration_s = parse_duration(value)
        if not low <= duration_s <= high:
            raise InvalidRequest(f"must be between {format_duration(low)} and {format_duration(high)}", hint="")
        return duration_s

    return _checked(parse)


def _policy(value: Any) -> Policy:
    try:
        return Policy(value)
    except ValueError:
        known = ", ".join(f"`{policy.value}`" for policy in Policy)
        raise _says(f"{_written(value)} is not a policy; there is {known}") from None


def _listen(value: Any) -> str:
    if not isinstance(value, str):
        raise _says('must be text in quotes, as `"127.0.0.1:8321"`')
    parse_listen(value)
    return value.strip()


def _api_key(value: Any) -> str:
    # The key itself appears in no message.
    if not isinstance(value, str) or not is_api_key(value):
        raise _says(f"must be {KEY_RULE}")
    return value


def _key_file(value: Any, info: ValidationInfo) -> str:
    return _path(value, info, "must be the path of a file that holds the key, in quotes")


def _origin(value: Any) -> str:
    if not isinstance(value, str) or not _ORIGIN.fullmatch(value):
        raise _says(f'{_written(value)} is not an origin; write `"https://app.example"`, without a path')
    return value.lower()


def _model_path(value: Any, info: ValidationInfo) -> str:
    return _path(value, info, "must be the path of a model folder, in quotes")


def _path(value: Any, info: ValidationInfo, must: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise _says(must)
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise _says(f"`{shown(value)}` begins with the home of a user who does not exist") from None
    return str(Path((info.context or {}).get("folder", ".")) / path)


def _repo(value: Any) -> str:
    if not isinstance(value, str) or not _REPO.fullmatch(value) or "--" in value or ".." in value:
        raise _says(f'{_written(value)} is not a repository; write `"organisation/name"`')
    return value


def _alias(value: Any) -> str:
    if not isinstance(value, str) or not is_model_name(value):
        raise _says(f"{_written(value)} is not a model name: {NAME_RULE}")
    return value


def _written_default(text: str) -> Any:
    """A default as the user would write it; validation turns it into the key's own type."""
    return Field(text)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, hide_input_in_errors=True)


class DaemonTable(_Table):
    """`[daemon]`"""

    max_memory: Annotated[str | int, _checked(_limit_or_auto)] = AUTO
    hard_limit: Annotated[str | int, _checked(_written_limit)] | None = None
    min_available: Annotated[str | int, _checked(_written_size)] | None = None
    poll_interval: Annotated[float, _seconds_between(0.01, 3600)] = _written_default("1s")
    policy: Annotated[Policy, PlainValidator(_policy)] = _written_default("graceful")
    prefill_memory_guard: bool = True
    drain_timeout: Annotated[float, _seconds_between(0, 86_400)] = _written_default("30s")
    load_timeout: Annotated[float, _seconds_between(0, 86_400)] = _written_default("60s")
    park_deadline: Annotated[float, _seconds_between(0, 86_400)] = _written_default("300s")
    fair_wait: Annotated[float, _seconds_between(0, 86_400)] = _written_default("10s")
    stall_timeout: Annotated[float, _seconds_between(0.1, 86_400)] = _written_default("60s")
    prefill_chunk: Annotated[int, Field(ge=16, le=8192)] = 256
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 32
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 256
    prefix_cache: Annotated[str | int, _checked(_size_or_auto)] = AUTO
    restore: Literal["none", "pinned", "loaded"] | None = None
    keep_awake: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_max_size: Annotated[int, _bytes_between(2**16, 2**40)] = _written_default("20M")
    log_backups: Annotated[int, Field(ge=0, le=100)] = 5


class ApiTable(_Table):
    """`[api]`"""

    listen: Annotated[str, _checked(_listen)] = "127.0.0.1:8321"
    api_key: Annotated[str, PlainValidator(_api_key)] | None = None
    api_key_file: Annotated[str, PlainValidator(_key_file)] | None = None
    allow_origins: list[Annotated[str, PlainValidator(_origin)]] = Field(default_factory=list)
    max_keep_alive: Annotated[float, _seconds_between(0, MAX_DURATION_S)] | None = None


class ModelTable(_Table):
    """`[models.NAME]`"""

    path: Annotated[str, PlainValidator(_model_path)] | None = None
    repo: Annotated[str, PlainValidator(_repo)] | None = None
    pin: bool = False
    preload: bool = False
    aliases: list[Annotated[str, PlainValidator(_alias)]] = Field(default_factory=list)
    ttl: Annotated[float, _seconds_between(1, MAX_DURATION_S)] | None = None
    max_context: Annotated[int, Field(ge=1, le=2**31)] | None = None


class Document(_Table):
    """The whole file."""

    daemon: DaemonTable = DaemonTable()
    api: ApiTable = ApiTable()
    models: dict[str, ModelTable] = Field(default_factory=dict)


def findings(invalid: ValidationError) -> Iterable[tuple[Location, str]]:
    """Each thing pydantic found: where, and what is wrong in our words."""
    for error in invalid.errors(include_url=False):
        yield error["loc"], _sentence(error)


def keys_of(location: Location) -> tuple[str, ...]:
    """The keys that are allowed in the table at this location."""
    match location:
        case ():
            return tuple(Document.model_fields)
        case ("daemon",):
            return tuple(DaemonTable.model_fields)
        case ("api",):
            return tuple(ApiTable.model_fields)
        case ("models", _):
            return tuple(ModelTable.model_fields)
    return ()


def _sentence(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "omlxd":
            return str(context["sentence"])
        case "extra_forbidden":
            return _unknown_key(error["loc"], error["input"])
        case "bool_type":
            return f"must be `true` or `false`, not {_written(error['input'])}"
        case "int_type" | "int_from_float":
            return f"must be a whole number, not {_written(error['input'])}"
        case "string_type":
            return f"must be text in quotes, not {_written(error['input'])}"
        case "list_type":
            return f'must be a list, as `["{shown(str(error["input"]))}"]`'
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a table, as `[{dotted(error['loc'])}]`, not {_written(error['input'])}"
        case "greater_than_equal":
            return f"{_written(error['input'])} is too small; the least is {context['ge']}"
        case "less_than_equal":
            return f"{_written(error['input'])} is too large; the most is {context['le']}"
        case "literal_error":
            return f"must be {str(context['expected']).replace(chr(39), '`')}, not {_written(error['input'])}"
    return error["msg"]


def _unknown_key(location: Location, value: object) -> str:
    table, key = location[:-1], str(location[-1])
    if table[:1] == ("models",) and isinstance(value, Mapping):
        return f'unknown table; a name with a dot needs quotes: `[models."{shown(f"{table[-1]}.{key}")}"]`'
    near = nearest(key, keys_of(table))
    if near:
        return f"unknown key; did you mean `{near}`?"
    for other, title in ((("daemon",), "[daemon]"), (("api",), "[api]"), (("models", ""), "a [models.NAME] table")):
        if key in keys_of(other):
            return f"unknown key; it belongs in {title}"
    return f"unknown key; there are {', '.join(f'`{known}`' for known in keys_of(table))}"


def _written(value: object) -> str:
    """A value as the file has it, short and in backticks."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{shown(value)}"`'
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return f"`{shown(str(value))}`"
