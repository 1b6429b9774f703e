"""Sizes and durations: what parses, what is refused, and that nothing is lost on the way out and in again."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.errors import InvalidRequest
from omlxd.core.units import (
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    format_bytes,
    format_duration,
    format_left,
    parse_duration,
    parse_limit,
    parse_size,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("8G", 8 * GIB),
        ("8GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8GB", 8 * 10**9),
        (" 8 gb ", 8 * 10**9),
        ("1.5G", GIB * 3 // 2),
        (".5K", 512),
        ("512M", 512 * 2**20),
        ("1T", 2**40),
        ("1TB", 10**12),
        ("3k", 3 * 1024),
        ("3kB", 3000),
        ("512 B", 512),
        ("1048576", 1048576),
        (1048576, 1048576),
        ("0", 0),
        (0, 0),
        (MAX_SIZE_BYTES, MAX_SIZE_BYTES),
        ("75%", 12 * GIB),
        ("12.5 %", 2 * GIB),
        ("100%", 16 * GIB),
    ],
)
def test_a_size_is_the_bytes_it_says(written: str | int, size_bytes: int) -> None:
    assert parse_size(written, ram_bytes=16 * GIB) == size_bytes


@pytest.mark.parametrize(
    "written",
    [
        "8 gigs",
        "",
        " ",
        "G",
        "-8G",
        "-1",
        -1,
        "nan",
        "inf",
        "1e9",
        "8G8",
        "8,5G",
        "0x10",
        "8GBB",
        "1.2.3G",
        "٨G",
        "8\nG!",
    ],
)
def test_what_is_not_a_size_is_refused_with_the_way_to_write_it(written: str | int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_size(written, ram_bytes=16 * GIB)
    assert "8G" in (refused.value.hint or "")
    assert not refused.value.message.endswith(".")


@pytest.mark.parametrize("written", ["0.5", ".5", "1.5", "8.0"])
def test_a_fraction_without_a_unit_is_refused_with_the_unit_it_lacks(written: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^`{written}` has no unit$") as refused:
        parse_size(written)
    assert f"`{written}G`" in (refused.value.hint or "")


@pytest.mark.parametrize("written", ["0.5B", "0.0001K", "0.0000000001%"])
def test_less_than_a_byte_is_not_rounded_to_the_0_that_means_none(written: str) -> None:
    with pytest.raises(InvalidRequest, match="is less than a byte"):
        parse_size(written, ram_bytes=16 * GIB)


@pytest.mark.parametrize("written", ["0", 0, "0.0", "0G", "0%"])
def test_0_is_0_however_it_is_written(written: str | int) -> None:
    assert parse_limit(written, ram_bytes=16 * GIB) == 0


@pytest.mark.parametrize(
    ("written", "hint"),
    [("8", "did you mean `8G`?"), (8, "did you mean `8G`?"), ("8192", "did you mean `8192M`?")],
)
def test_a_limit_of_a_bare_number_below_1_mib_lacks_its_unit(written: str | int, hint: str) -> None:
    with pytest.raises(InvalidRequest, match="too little for a memory limit") as refused:
        parse_limit(written)
    assert refused.value.hint == hint


@pytest.mark.parametrize("written", ["500K", "12B", "1048576"])
def test_a_small_limit_that_has_its_unit_is_meant(written: str) -> None:
    assert parse_limit(written) == parse_size(written)


def test_the_message_quotes_what_was_written() -> None:
    with pytest.raises(InvalidRequest, match=r"^`8 gigs` is not a size$"):
        parse_size("8 gigs")


@pytest.mark.parametrize("written", [True, None, 8.5, math.nan, [], b"8G"])
def test_a_value_of_another_type_is_not_a_size(written: object) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        parse_size(written)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", [2**60 + 1, str(2**60 + 1), "2000000T", "101%", "9" * 63, 2**200])
def test_an_absurd_size_is_out_of_range(written: str | int) -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        parse_size(written, ram_bytes=16 * GIB)


def test_a_text_of_thousands_of_digits_is_refused_and_shortened() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_size("9" * 100_000)
    assert len(refused.value.message) < 120


def test_an_integer_too_long_to_print_is_out_of_range() -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        parse_size(10**5000)
    with pytest.raises(InvalidRequest, match="out of range"):
        parse_duration(10**5000)


def test_a_percentage_needs_the_memory_it_is_a_part_of() -> None:
    with pytest.raises(InvalidRequest, match="`50%` is a part of the machine's memory"):
        parse_size("50%")


@pytest.mark.parametrize(
    ("written", "duration_s"),
    [
        ("1s", 1.0),
        ("500ms", 0.5),
        ("10m", 600.0),
        ("10min", 600.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1h30m", 5400.0),
        ("1 H 30 M", 5400.0),
        ("1d 2h 3m 4s 5ms", 93784.005),
        ("1.5h", 5400.0),
        ("30", 30.0),
        ("0.25", 0.25),
        (30, 30.0),
        (0.5, 0.5),
        ("0s", 0.0),
    ],
)
def test_a_duration_is_the_seconds_it_says(written: str | float, duration_s: float) -> None:
    assert parse_duration(written) == duration_s


@pytest.mark.parametrize(
    "written", ["", "soon", "-1s", -1, "30m1h", "1s1s", math.nan, math.inf, "nan", True, None, "1 s ago"]
)
def test_what_is_not_a_duration_is_refused_with_the_way_to_write_it(written: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_duration(written)  # type: ignore[arg-type]
    assert "1h30m" in (refused.value.hint or "")


@pytest.mark.parametrize("written", ["3651d", "9" * 63, "9" * 1000, 2**2000, 1e300])
def test_a_duration_of_more_than_ten_years_is_refused(written: str | float) -> None:
    with pytest.raises(InvalidRequest):
        parse_duration(written)


@pytest.mark.parametrize(
    ("size_bytes", "written"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (98 * 2**20, "98.0 MiB"),
        (int(1.23 * GIB), "1.23 GiB"),
        (8 * GIB, "8.00 GiB"),
        (100 * GIB, "100 GiB"),
        (GIB - 1, "1.00 GiB"),
        (1000 * 2**20, "1000 MiB"),
        (int(9.999 * GIB), "10.0 GiB"),
        (-3 * 2**20, "-3.00 MiB"),
    ],
)
def test_bytes_are_written_with_three_digits(size_bytes: int, written: str) -> None:
    assert format_bytes(size_bytes) == written


@pytest.mark.parametrize(
    ("duration_s", "written"),
    [
        (0, "0 s"),
        (-0.3, "0 s"),
        (0.35, "350 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (3, "3 s"),
        (9.97, "10 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (4 * 3600, "4 h"),
        (5400, "1 h 30 min"),
        (3600 + 5, "1 h"),
        (2 * 86400 + 3 * 3600, "2 d 3 h"),
    ],
)
def test_durations_are_written_in_at_most_two_units(duration_s: float, written: str) -> None:
    assert format_duration(duration_s) == written


@given(st.integers(0, MAX_SIZE_BYTES))
def test_bytes_as_text_and_as_a_number_are_the_same_size(size_bytes: int) -> None:
    assert parse_size(size_bytes) == parse_size(str(size_bytes)) == parse_size(f"{size_bytes} B") == size_bytes


@given(st.integers(0, 2**20), st.sampled_from(["K", "M", "G", "KiB", "MiB", "GiB"]))
def test_a_whole_number_of_binary_units_is_exact(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * 1024 ** ("KMG".index(unit[0]) + 1)


@given(st.integers(0, 2**49))
def test_a_formatted_size_parses_to_within_half_a_percent(size_bytes: int) -> None:
    # Three digits are shown, and a size is a whole number of bytes, rounded down.
    assert abs(parse_size(format_bytes(size_bytes)) - size_bytes) <= 0.0051 * size_bytes + 1


@given(st.floats(0, MAX_DURATION_S))
def test_a_number_of_seconds_is_itself(duration_s: float) -> None:
    assert parse_duration(duration_s) == duration_s


@given(st.floats(0.01, MAX_DURATION_S))
def test_a_formatted_duration_parses_to_less_than_one_smaller_unit_away(duration_s: float) -> None:
    away_s = abs(parse_duration(format_duration(duration_s)) - duration_s)
    assert away_s <= max(0.51, duration_s / 24)
    assert away_s <= 3600


@given(st.text(max_size=40))
def test_any_text_is_a_size_in_range_or_refused_with_a_hint(text: str) -> None:
    size_bytes, hint = _outcome(lambda: parse_size(text, ram_bytes=GIB))
    assert hint or 0 <= size_bytes <= MAX_SIZE_BYTES


@given(st.text(alphabet="0123456789.dhms in", max_size=20))
def test_any_text_is_a_duration_in_range_or_refused_with_a_hint(text: str) -> None:
    duration_s, hint = _outcome(lambda: parse_duration(text))
    assert hint or 0 <= duration_s <= MAX_DURATION_S


def _outcome(parse: Callable[[], float]) -> tuple[float, str | None]:
    try:
        return parse(), None
    except InvalidRequest as refused:
        return -1, refused.hint


@pytest.mark.parametrize(("left_s", "said"), [(0.0, "1 s left"), (2.6, "3 s left"), (125.4, "2 min 5 s left")])
def test_what_is_left_is_a_guess_in_whole_seconds(left_s: float, said: str) -> None:
    assert format_left(left_s) == said
