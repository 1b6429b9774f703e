"""A decision in full, in plain words: what was seen, who was weighed, what was done, what it freed and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omlxd.cli.sentences import deed
from omlxd.cli.stories import Record, considered
from omlxd.cli.values import ago, amount, duration, moment, named, number, one_line, size
from omlxd.core.limits import limit_set_by
from omlxd.core.room import missing_text

_TRIGGERS: Final = {
    "limit": "to get below the soft limit",
    "load": "to make room for {for_model}",
    "request": "to make room for a request to {for_model}",
    "block": "to make room for the next block of {for_model}'s KV cache",
    "ttl": "because nobody had used it for its ttl",
    "reload": "because the manifest was reloaded",
}
_MOST_REQUESTS: Final = 8


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A labelled part of an explanation; each line of it may be wrapped, and begins at the label's right."""

    label: str
    lines: tuple[str, ...]


def headline(decision: Record, now: float) -> str:
    """`d2, 20:46:19 (3 min ago): unloaded `tiny-c` to get below the soft limit`."""
    when = f"{moment(decision.get('ts'), now)} ({ago(decision.get('ts'), now)})"
    return f"{decision_id(decision)}, {when}: {deed_and_purpose(decision)}"


def deed_and_purpose(decision: Record) -> str:
    """`unloaded `tiny-c` to get below the soft limit`."""
    return f"{deed(decision) or 'nothing was done'} {purpose(decision)}".rstrip()


def decision_id(decision: Record) -> str:
    """Its id, or a word for one that has none."""
    return one_line(decision.get("decision")) or "a decision"


def purpose(decision: Record) -> str:
    """What a decision was for: `to make room for `small`, for r4`; empty when its trigger is not known."""
    rung = one_line(decision.get("rung"))
    if rung.startswith("system"):
        return "because other programs left the system too little memory"
    if rung == "drop_cache":
        return "to get below the hard limit"
    if rung == "settle":
        return "because it turned out larger than its files said"
    words = _TRIGGERS.get(one_line(decision.get("trigger")), "")
    for_model = decision.get("for_model") or decision.get("victim")
    request = decision.get("for_request")
    return words.format(for_model=named(for_model)) + (f", for {one_line(request)}" if words and request else "")


def explanation(decision: Record, loads: tuple[Record | None, Record | None], now: float) -> list[Paragraph]:
    """The decision, part by part.

    Args:
        decision: its record.
        loads: the victim's last load before it and the first one after it, as far as the log has them.
        now: Unix time.
    """
    parts = [
        ("why", (one_line(decision.get("reason")) or "the record gives no reason",)),
        ("seen", _seen(decision)),
        ("weighed", _weighed(decision)),
        ("did", _did(decision)),
        ("freed", _freed(decision)),
        ("cost", _cost(decision, loads, now)),
    ]
    return [Paragraph(label, lines) for label, lines in parts if lines]


def _seen(decision: Record) -> tuple[str, ...]:
    """The reading that was decided on, the limits, and which part of them binds."""
    gauge = "active memory" if decision.get("policy") == "reference" else "used memory"
    found = [f"{gauge} {size(decision.get('before_bytes'))}, {_limits(decision)}"]
    if (need := number(decision.get("need_bytes"))) is not None:
        short = number(decision.get("short_bytes"))
        needed = missing_text(int(need), int(short), "were") if short is not None and short > 0 else size(need)
        found.append(f"{named(decision.get('for_model'))} needed {needed}")
    seen = decision.get("seen")
    if isinstance(seen, Mapping):
        found.append(_beside(seen))
    return tuple(filter(None, found))


def _limits(decision: Record) -> str:
    soft, hard = number(decision.get("soft_limit_bytes")), number(decision.get("hard_limit_bytes"))
    binding = limit_set_by(one_line(decision.get("binding")), one_line(decision.get("limit_origin")))
    because = f" (set by {binding})" if binding else ""
    soft_text = f"soft limit {size(soft)}{because}" if soft else "no soft limit"
    return f"{soft_text}, hard limit {size(hard)}" if hard else soft_text


def _beside(seen: Mapping[str, Any]) -> str:
    """What a reading shows beside the number that was compared."""
    parts = []
    if cache := number(seen.get("cache_bytes")):
        parts.append(f"MLX's cache of freed buffers {size(cache)}")
    if overhead := number(seen.get("overhead_bytes")):
        parts.append(f"outside MLX {size(overhead)}")
    if total := number(seen.get("system_total_bytes")):
        parts.append(f"the system {size(seen.get('system_available_bytes'))} available of {size(total)}")
    if seen.get("at_rest") is False:
        parts.append("read while a step was in flight")
    return ", ".join(parts)


def _weighed(decision: Record) -> tuple[str, ...]:
    """The ranked candidates, each with why it was or was not chosen; in columns."""
    rows = []
    for candidate in considered(decision):
        request = one_line(candidate.get("request"))
        name = f"{request} of {named(candidate.get('model'))}" if request else named(candidate.get("model"))
        held = number(candidate.get("frees_bytes" if request else "weights_bytes"))
        chosen = candidate.get("chosen") is True
        verdict = f"{'chosen' if chosen else 'left alone'}: {one_line(candidate.get('why')) or 'no reason given'}"
        rows.append(("→" if chosen else " ", name, size(held) if held else "", verdict))
    if not rows:
        return ()
    wide, wider = max(len(row[1]) for row in rows), max(len(row[2]) for row in rows)
    lines = (f"{mark} {name:<{wide}}  {held:>{wider}}" for mark, name, held, _ in rows)
    return tuple(f"{line.rstrip() if not wider else line}  {row[3]}" for line, row in zip(lines, rows, strict=True))


def _did(decision: Record) -> tuple[str, ...]:
    done = deed(decision)
    if done is None:
        return ("nothing",)
    took = number(decision.get("duration_s"))
    how = f" in {duration(took)}" if took else ""
    policy, rung = one_line(decision.get("policy")), one_line(decision.get("rung")).replace("_", " ")
    by = ", ".join(filter(None, [f"policy {policy}" if policy else "", f"rung `{rung}`" if rung else ""]))
    return (f"{done}{how}" + (f" ({by})" if by else ""),)


def _freed(decision: Record) -> tuple[str, ...]:
    before, after = number(decision.get("before_bytes")), number(decision.get("after_bytes"))
    if before is None or after is None:
        return ()
    soft = number(decision.get("soft_limit_bytes"))
    now_within = f", {'within' if after <= soft else 'still over'} the soft limit" if soft else ""
    freed = f"{size(before - after)}: " if before > after else "nothing that the gauge shows: "
    return (f"{freed}from {size(before)} to {size(after)}{now_within}",)


def _cost(decision: Record, loads: tuple[Record | None, Record | None], now: float) -> tuple[str, ...]:
    """What somebody lost by it: requests, and the time that a load takes again."""
    lines = []
    ended = decision.get("requests")
    action = one_line(decision.get("action"))
    if isinstance(ended, list) and ended:
        parked = action == "park" or (action == "unload" and decision.get("policy") == "graceful")
        verb = "parked, to go on later" if parked else "ended"
        names = ", ".join(one_line(request) for request in ended[:_MOST_REQUESTS])
        more = f" and {len(ended) - _MOST_REQUESTS} more" if len(ended) > _MOST_REQUESTS else ""
        lines.append(f"{amount(len(ended), 'request')} {verb}: {names}{more}")
    elif isinstance(ended, list):
        lines.append("no request was ended")
    if action == "unload":
        lines.append(_reload(decision, loads, now))
    return tuple(filter(None, lines))


def _reload(decision: Record, loads: tuple[Record | None, Record | None], now: float) -> str:
    before, after = loads
    model = named(decision.get("victim"))
    if after is not None:
        return f"{model} was loaded again at {moment(after.get('ts'), now)}, in {duration(after.get('load_s'))}"
    if before is not None and number(before.get("load_s")) is not None:
        return f"{model} has to be loaded again when it is needed; the last time that took {duration(before['load_s'])}"
    return f"{model} has to be loaded again when it is needed"
