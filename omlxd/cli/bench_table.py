"""The tables of `bench`: speeds of so many streams, and memory predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from omlxd.cli import output
from omlxd.cli.bench_figures import FIGURES
from omlxd.cli.cells import NOTHING, plain
from omlxd.cli.render import draw, plain_table
from omlxd.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from omlxd.cli.bench_figures import Memory, Speed, Spread
    from omlxd.cli.bench_report import Load, Report

_CACHED_PART: Final = 0.1
"""A load with less than this part of its weights from the disk has found them in the page cache."""


def draw_report(report: Report, ratios: Mapping[str, Any] | None) -> None:
    """Write the figures to stdout; `ratios` are those to an earlier benchmark."""
    tokens = f"prompts of {report.prompt_tokens} tokens, answers of {report.generate_tokens}"
    many = "1 round" if report.rounds == 1 else f"medians of {report.rounds} rounds (and their range)"
    output.data(f"{report.model} on {report.backend or 'an unknown backend'}: {tokens}; {many}")
    output.data()
    _draw_speeds(report, ratios)
    output.data()
    table = plain_table("MEMORY", ">PREDICTED", ">MEASURED", ">ERROR")
    for each in report.memory:
        error = NOTHING if each.error is None else f"{100 * each.error:+.1f}%"
        table.add_row(_what(each), format_bytes(each.predicted_bytes), format_bytes(each.measured_bytes), error)
    draw(table)
    if report.load is not None:
        output.data()
        output.data(_load_text(report.load, (ratios or {}).get("load_s")))


def _draw_speeds(report: Report, ratios: Mapping[str, Any] | None) -> None:
    table = plain_table(">STREAMS", ">PREFILL TOK/S", ">FIRST TOKEN", ">DECODE TOK/S", ">EACH", ">GAP P99")
    for speed in report.speeds:
        decode = speed.of("decode_tokens_per_s")
        each = NOTHING if decode is None else _rate(decode.median / speed.streams)
        first, gap = speed.of("first_token_s"), speed.of("gap_p99_s")
        table.add_row(
            str(speed.streams),
            _rates(speed.of("prefill_tokens_per_s")),
            _times(first),
            _rates(decode),
            each,
            NOTHING if gap is None else format_duration(gap.median),
        )
        if ratios is not None:
            _add_ratios(table, ratios, speed)
    draw(table)
    if any(speed.of("decode_tokens_per_s") is None for speed in report.speeds):
        output.note("the answers were too short for a decode speed; `--generate` makes them longer")


def _add_ratios(table: Any, ratios: Mapping[str, Any], speed: Speed) -> None:
    """A line with each figure's ratio to the earlier one."""
    found = next(each for each in ratios["speed"] if each["streams"] == speed.streams)
    told = {figure: NOTHING if found[figure] is None else f"× {found[figure]:.2f}" for figure in FIGURES}
    decode = told["decode_tokens_per_s"]
    ratios_told = (told["prefill_tokens_per_s"], told["first_token_s"], decode, decode, told["gap_p99_s"])
    table.add_row("before", *map(plain, ratios_told))


def _what(memory: Memory) -> str:
    streams = "" if memory.streams == 1 else plain(f"{memory.streams} × ")
    return {
        "weights": "weights",
        "prompt_kv": f"KV cache of a prompt of {memory.tokens} tokens",
        "step": f"in passing, a step of {memory.chunk_tokens} at {memory.tokens} tokens",
        "peak": f"weights, KV cache and step at the peak of {memory.tokens} tokens",
        "kv": f"KV cache of {streams}{memory.tokens} tokens, answer included",
    }[memory.what]


def _load_text(load: Load, ratio: float | None) -> str:
    when = "" if load.measured_now else " when it was loaded last (`--reload` measures it anew)"
    speed = "" if load.bytes_per_s is None else f", {format_bytes(int(load.bytes_per_s))}/s"
    compared = "" if ratio is None else f", {ratio:.2f} of the time before"
    return f"load {format_duration(load.load_s)}{speed}{_source(load)}{compared}{when}"


def _source(load: Load) -> str:
    """Where the weights came from, which decides how fast."""
    if load.disk_bytes is None or not load.weights_bytes:
        return ""
    part = load.disk_bytes / load.weights_bytes
    return ", out of the page cache" if part < _CACHED_PART else f", {min(100, round(100 * part))}% from the disk"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _rates(found: Spread | None) -> str:
    if found is None:
        return NOTHING
    text = _rate(found.median)
    return text if found.least == found.most else f"{text} ({_rate(found.least)}-{_rate(found.most)})"


def _times(found: Spread | None) -> str:
    if found is None:
        return NOTHING
    text = format_duration(found.median)
    if found.least == found.most:
        return text
    return f"{text} ({format_duration(found.least)}-{format_duration(found.most)})"
