"""Sizes and durations as people write and read them: `8G` and `1h30m` in, `7.45 GiB` and `2 min 5 s` out.

Sizes follow the manifest's contract: `8G` and `8GiB` are 8 * 2**30 bytes, `8GB` is 8 * 10**9, `75%` is a part of
the machine's memory, and a bare number is bytes. Parsing is exact (integers, not floats) and never guesses.
"""

from __future__ import annotations

import re
from typing import Final

from omlxd.core.errors import InvalidRequest
from omlxd.core.wording import shown

MAX_SIZE_BYTES: Final = 2**60
LEAST_BARE_LIMIT_BYTES: Final = 2**20
MAX_DURATION_S: Final = 10 * 365 * 86_400.0

SIZE_HINT: Final = "write `8G`, `8GB`, `75%` or bytes"
DURATION_HINT: Final = "write `500ms`, `1s`, `10m`, `2h`, `1h30m` or seconds"

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
# Patterns are texts, compiled (and kept by `re`) when something is parsed: most commands only format.
_NUMBER: Final = r"\d+(?:\.\d*)?|\.\d+"
_SIZE: Final = rf"(?P<number>{_NUMBER})\s*(?P<unit>%|b|[kmgt](?:b|ib)?)?"
_DURATION_UNITS: Final = {  # milliseconds, and how the unit is written
    "d": (86_400_000, "d"),
    "h": (3_600_000, "h"),
    "m": (60_000, "min|m(?!s)"),
    "s": (1_000, "sec|s"),
    "ms": (1, "ms"),
}
_DURATION: Final = "".join(
    rf"(?:(?P<{unit}>{_NUMBER})\s*(?:{words})\s*)?" for unit, (_, words) in _DURATION_UNITS.items()
)
_FLAGS: Final = re.IGNORECASE | re.ASCII
_LONGEST_TEXT: Final = 64  # enough for every value in range; keeps the arithmetic small


def parse_size(text_or_int: str | int, *, ram_bytes: int | None = None) -> int:
    """The number of bytes that `8G`, `8GiB`, `8GB`, `75%`, `512M` or a bare number stands for.

    Args:
        text_or_int: what the user wrote; case and spaces do not matter.
        ram_bytes: the machine's memory, which `%` is a part of; without it a percentage is refused.

    Raises:
        InvalidRequest: it is not a size, or is negative, above 100 % or above 2**60 bytes; it has a fraction and no
            unit, or is less than a byte and not 0.
    """
    written = _shown(text_or_int)
    if isinstance(text_or_int, int) and not isinstance(text_or_int, bool):
        return _checked_size(text_or_int, written)
    match = re.fullmatch(_SIZE, text_or_int.strip(), _FLAGS) if isinstance(text_or_int, str) else None
    if match is None or len(match["number"]) > _LONGEST_TEXT:
        raise _not_a("size", written, SIZE_HINT)
    (numerator, denominator), unit = _ratio(match["number"]), (match["unit"] or "b").lower()
    if "." in match["number"] and numerator and not match["unit"]:
        raise InvalidRequest(f"`{written}` has no unit", hint=f"write `{written}G`, or a whole number of bytes")
    if unit == "%":
        size_bytes = _percentage(numerator, denominator, written, ram_bytes)
    else:
        base = 1000 if unit.endswith("b") and len(unit) == 2 else 1024
        size_bytes = _checked_size(numerator * base ** "bkmgt".index(unit[0]) // denominator, written)
    if numerator and not size_bytes:  # 0 has a meaning of its own, often `no limit`
        raise InvalidRequest(f"`{written}` is less than a byte", hint=SIZE_HINT)
    return size_bytes


def parse_limit(text_or_int: str | int, *, ram_bytes: int | None = None) -> int:
    """As `parse_size`, of a memory limit: a bare number below 1 MiB that is not 0 lacks its unit.

    Raises:
        InvalidRequest: it is not a size, or such a number.
    """
    size_bytes, written = parse_size(text_or_int, ram_bytes=ram_bytes), _shown(text_or_int)
    if 0 < size_bytes < LEAST_BARE_LIMIT_BYTES and written.isdecimal():
        hint = f"did you mean `{size_bytes}{'G' if size_bytes < 1024 else 'M'}`?"
        raise InvalidRequest(f"`{written}` is {format_bytes(size_bytes)}, too little for a memory limit", hint=hint)
    return size_bytes


def parse_duration(text_or_number: str | float) -> float:
    """The seconds that `500ms`, `10m`, `1h30m` or a bare number of seconds stand for.

    Raises:
        InvalidRequest: it is not a duration, or is negative or above ten years.
    """
    written = _shown(text_or_number)
    if isinstance(text_or_number, bool) or not isinstance(text_or_number, str | int | float):
        raise _not_a("duration", written, DURATION_HINT)
    if not isinstance(text_or_number, str):
        if not 0 <= text_or_number <= MAX_DURATION_S:  # refuses nan too
            raise _out_of_range("duration", written, "between 0 and ten years", DURATION_HINT)
        return float(text_or_number)
    text = text_or_number.strip()
    if len(text) > _LONGEST_TEXT:
        raise _not_a("duration", written, DURATION_HINT)
    if re.fullmatch(_NUMBER, text, _FLAGS):
        return parse_duration(float(text))
    match = re.fullmatch(_DURATION, text, _FLAGS)
    if not text or match is None:
        raise _not_a("duration", written, DURATION_HINT)
    amounts = {unit: _ratio(amount) for unit, amount in match.groupdict().items() if amount}
    # An integer ratio divides exactly once, so `1d 2h 3m 4s 5ms` is the nearest float to what it says.
    common = max(denominator for _, denominator in amounts.values())
    total_ms = sum(n * (common // d) * _DURATION_UNITS[unit][0] for unit, (n, d) in amounts.items())
    if total_ms > MAX_DURATION_S * 1000 * common:
        raise _out_of_range("duration", written, "at most ten years", DURATION_HINT)
    return total_ms / (1000 * common)


def format_bytes(size_bytes: int) -> str:
    """Bytes with three significant digits and a binary unit: `1.23 GiB`, `98.0 MiB`, `512 B`."""
    sign, value, step = ("-" if size_bytes < 0 else ""), float(abs(size_bytes)), 0
    while value >= 1024 and step < len(_BINARY) - 1:
        value, step = value / 1024, step + 1
    if step and value >= 1023.5 and step < len(_BINARY) - 1:  # would be written `1024 MiB`
        value, step = 1.0, step + 1
    decimals = 0 if step == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{sign}{value:.{decimals}f} {_BINARY[step]}"


def format_duration(duration_s: float) -> str:
    """Seconds in at most two units: `350 ms`, `3 s`, `2 min 5 s`, `4 h`; a negative value counts as 0."""
    if duration_s < 0.0005:
        return "0 s"
    if duration_s < 0.9995:
        return f"{round(duration_s * 1000)} ms"
    if duration_s < 9.95:
        return f"{duration_s:.1f}".removesuffix(".0") + " s"
    seconds = round(duration_s)
    for size_s, unit, smaller_s, smaller in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size_s:
            whole, rest = divmod(seconds, size_s)
            return f"{whole} {unit}" + (f" {rest // smaller_s} {smaller}" if rest >= smaller_s else "")
    return f"{seconds} s"


def format_left(left_s: float) -> str:
    """How long something is likely to take still, in whole seconds, since it is a guess: `3 s left`."""
    return f"{format_duration(float(max(1, round(left_s))))} left"


def _ratio(number: str) -> tuple[int, int]:
    """A decimal text as an exact numerator and a power of ten."""
    whole, _, decimals = number.partition(".")
    return int(whole + decimals), 10 ** len(decimals)


def _percentage(numerator: int, denominator: int, written: str, ram_bytes: int | None) -> int:
    if numerator > 100 * denominator:
        raise _out_of_range("size", written, "at most `100%` of the machine's memory", SIZE_HINT)
    if ram_bytes is None:
        raise InvalidRequest(
            f"`{written}` is a part of the machine's memory, which is not meant here", hint="write `8G`, `8GB` or bytes"
        )
    return ram_bytes * numerator // (100 * denominator)


def _checked_size(size_bytes: int, written: str) -> int:
    if not 0 <= size_bytes <= MAX_SIZE_BYTES:
        raise _out_of_range("size", written, "between 0 and 2**60 bytes", SIZE_HINT)
    return size_bytes


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 2**200:  # Python refuses to print the longest ones
        return "a number of more than 60 digits"
    if isinstance(value, bool):
        return str(value).lower()  # as TOML and JSON have it
    return shown(value.strip() if isinstance(value, str) else repr(value))


def _not_a(kind: str, written: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"`{written}` is not a {kind}", hint=hint)


def _out_of_range(kind: str, written: str, bounds: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"`{written}` is out of range; a {kind} is {bounds}", hint=hint)
