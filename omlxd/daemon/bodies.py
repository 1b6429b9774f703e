"""Request bodies: read, parsed and checked with all problems told at once, none of them quoting what was sent."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from omlxd.core.errors import InvalidRequest
from omlxd.core.wording import nearest, shown
from omlxd.daemon.wish import MAX_STOP_CHARACTERS, MAX_STOPS
from omlxd.engine.glibc import trim_heap

_LONG_BODY_BYTES = 64 * 1024  # above it parsing would hold up the loop for milliseconds
MOST_MESSAGES = 16_384
"""Messages of one conversation: more than any context holds, and few enough to go through in milliseconds."""
MOST_TOOLS = 1024
MOST_CALLS = 4096
"""Tools on offer, and calls in one conversation: with more of them a request would hold the loop for seconds."""
MOST_NAMES = 131_072
"""Names of fields in a body, at any depth: validating holds the interpreter, and each that is wrong costs memory."""
_MOST_PROBLEMS = 20
_HEAP_BODY_BYTES = 2**20  # what such a body has left in the heap is given back at once
_TOO_MANY_PROBLEMS = 10_000  # a body can be wrong a million times, and to list that would take a minute


class Body(BaseModel):
    """Base of all bodies: exact types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LoadBody(Body):
    """POST models/{name}/load."""

    wait: bool = True
    pin: bool = False


class UnloadBody(Body):
    """POST models/{name}/unload."""

    now: bool = False
    drain_timeout_s: Annotated[float, Field(ge=0, le=86_400)] | None = None


class PinBody(Body):
    """POST models/{name}/pin."""

    force: bool = False


class LimitsBody(Body):
    """PATCH limits."""

    max_memory: str | int
    force: bool = False


class ReloadBody(Body):
    """POST reload."""

    wait: bool = True
    force: bool = False


class StopBody(Body):
    """POST stop."""

    now: bool = False
    restart: bool = False
    force: bool = False


class NoBody(Body):
    """A route that takes no fields."""


def _of_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("json_object", "must be JSON, which has no `NaN` and no `Infinity`") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_of_json)]
"""An object of any fields: the parser takes numbers in it that JSON does not have."""
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


def problem_of(field: str, what: str) -> PydanticCustomError:
    """What a validator of a whole body raises: this field of it is wrong."""
    return PydanticCustomError(f"{_OF_FIELD}{field}", "{what}", {"what": what})


def told_by(field: str, values: Sequence[str]) -> Discriminator:
    """The discriminator of a union whose members are told apart by this field; the tag of a member is `as VALUE`."""

    def tag_of(value: Any) -> str | None:
        told = value.get(field) if isinstance(value, dict) else getattr(value, field, None)
        return f"as {told}" if isinstance(told, str) else None

    quoted = [f"`{value}`" for value in values]
    must_be = f"must be one of {', '.join(quoted)}" if len(quoted) > 1 else f"must be {quoted[0]}"
    return Discriminator(tag_of, custom_error_type=f"{_OF_FIELD}{field}", custom_error_message=must_be)


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """The request's body as this kind; no body at all counts as `{}`.

    Raises:
        InvalidRequest: it is not JSON or has problems; all are in the message, the first field in `details["param"]`.
    """
    try:
        content = await request.body()
    except ClientDisconnect:
        raise InvalidRequest("the client went away before it had sent the body") from None
    if len(content) > _LONG_BODY_BYTES:
        return await asyncio.to_thread(_parse_long, content, kind)
    return parse_body(content, kind)


def _parse_long(content: bytes, kind: type[AnyBody]) -> AnyBody:
    try:
        return parse_body(content, kind)
    finally:
        if len(content) > _HEAP_BODY_BYTES:
            trim_heap()  # else it would count as memory that belongs to nobody, and models would make way for it


def parse_body(content: bytes, kind: type[AnyBody]) -> AnyBody:
    """The body in these bytes; raises InvalidRequest."""
    if content.count(b'":') - content.count(b'\\":') > MOST_NAMES:  # those in a text are escaped
        raise InvalidRequest(f"the body has more than {MOST_NAMES} names of fields", hint="send less at a time")
    problems: Sequence[Any] = ()
    try:
        return kind.model_validate_json(content or b"{}")
    except ValidationError as invalid:
        if (count := invalid.error_count()) <= _TOO_MANY_PROBLEMS:
            problems = invalid.errors(include_url=False, include_context=True, include_input=False)
    # Not within `except`: the errors hold all that was sent, and what is raised there would hold the errors.
    if not problems:
        raise InvalidRequest(f"the body has {count} problems", hint="`/openapi.json` says what it may hold")
    if problems[0]["type"] == "json_invalid":
        reason = str(problems[0].get("ctx", {}).get("error", "it cannot be parsed"))
        reason = _LONE_SURROGATE.sub("a `\\\\u` escape is half of a surrogate pair, which is no character,", reason)
        raise InvalidRequest(f"the body is not JSON: {reason}", hint="send a JSON object")
    raise _invalid(problems, kind)


def _invalid(problems: Sequence[Any], kind: type[Body]) -> InvalidRequest:
    told: dict[str, str] = {}  # of a union only the first branch's complaint: one sentence a field
    for problem in problems:
        told.setdefault(*_told(problem))
    for field in [field for field, what in told.items() if what is _CONTENT]:
        if any(other.startswith(field.rstrip("`") + "[") for other in told):
            del told[field]  # it is a list, and something is wrong in it
    shown_problems = [f"{field}: {what}" if field else what for field, what in told.items()]
    message = "; ".join(shown_problems[:_MOST_PROBLEMS])
    if len(shown_problems) > _MOST_PROBLEMS:
        message += f"; and {len(shown_problems) - _MOST_PROBLEMS} more problems"
    first = next(iter(told)).strip("`") or None
    return InvalidRequest(message, hint=_hint(problems, kind), details={"param": first, "problems": shown_problems})


def _told(problem: Any) -> tuple[str, str]:
    location = [part for part in problem["loc"] if not _is_branch(part)]
    if location and location[0] in UNION_WORDS and problem["type"] != "missing":
        return f"`{location[0]}`", UNION_WORDS[location[0]]
    if str(problem["type"]).startswith(_OF_FIELD):
        location.append(str(problem["type"]).removeprefix(_OF_FIELD))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    named = f"`{shown(field)}`" if field else ""
    if problem["type"] == "extra_forbidden":
        return named, "is not a field that omlxd understands"
    if problem["type"] == "missing":
        return named, "is missing"
    if not field:
        return "", "the body must be a JSON object"
    if location[-1] == "content" and problem["type"] in ("string_type", "list_type", "too_short"):
        return named, _CONTENT
    if problem["type"] == "literal_error":
        return named, _one_of(str(problem["ctx"]["expected"]))
    if problem["type"] == "none_required":
        return named, "is not supported; leave it out"
    if (plain := _LENGTHS.get(problem["type"])) is not None:
        is_empty = problem["ctx"].get("min_length") == 1
        return named, "must not be empty" if is_empty else plain.format(**problem["ctx"])
    return named, _lowered(str(problem["msg"]))


_LENGTHS = {
    "too_short": "must have at least {min_length} items, and has {actual_length}",
    "too_long": "must have at most {max_length} items, and has {actual_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}
_OF_FIELD = "of field "
_LONE_SURROGATE = re.compile("unexpected end of hex escape|lone leading surrogate in hex escape")
_CONTENT = "must be a string, or a list of parts; neither of them empty"
UNION_WORDS = {
    "stop": f"must be a string of 1 to {MAX_STOP_CHARACTERS} characters, or a list of up to {MAX_STOPS} of them",
    "max_memory": "must be a size such as `8G`, a percentage, `auto`, or a number of bytes",
    "prompt": "must be a string, a list of up to 64 strings, or token ids; none of them empty",
    "logit_bias": "must be an object of up to 1024 token ids, each with a number between -100 and 100",
}
"""What a field may be, told in one sentence instead of a complaint from each branch of its union."""


def _is_branch(part: object) -> bool:
    # pydantic names the tried branch of a union in the location: `str`, `list[...]`, `constrained-str`, ...
    return isinstance(part, str) and (part in ("str", "int", "constrained-str") or part.startswith(("list[", "as ")))


def _one_of(expected: str) -> str:
    """What a field may be that takes a few values only."""
    words = re.findall("'([^']*)'", expected) or [expected.lower()]
    if len(words) == 1:
        return f"can only be `{words[0]}`"
    return f"must be one of {', '.join(f'`{word}`' for word in words)}"


def _lowered(message: str) -> str:
    message = message.removeprefix("Input ").removeprefix("Value ")
    if message.startswith("should "):
        message = "must " + message.removeprefix("should ")
    return message[:1].lower() + message[1:]


def _hint(problems: Sequence[Any], kind: type[Body]) -> str | None:
    unknown = [str(each["loc"][0]) for each in problems if each["type"] == "extra_forbidden" and len(each["loc"]) == 1]
    if not unknown:
        return None
    for name in unknown[:_MOST_PROBLEMS]:
        if near := nearest(name, kind.model_fields):
            return f"did you mean `{near}`?"
    return (
        "the fields are " + ", ".join(f"`{name}`" for name in kind.model_fields) if kind.model_fields else "send `{}`"
    )
