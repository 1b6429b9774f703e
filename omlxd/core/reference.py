"""The reference ladder: rules R6 to R9 to the letter, where a busy model can be the victim."""

from __future__ import annotations

from typing import Final

from omlxd.core.case import Case, Rung, lru_first, lru_key, unused_for
from omlxd.core.decision import AbortRequests, Decision, Outcome, Unload
from omlxd.core.rungs import await_unloading, cancel_load, drop_cache, only_at_rest, system_short, within_limit
from omlxd.core.snapshot import Candidate, EntrySnapshot
from omlxd.core.units import format_bytes


def unload_lru(case: Case) -> Decision | None:
    """R6, R10: the least recently used model that is not pinned, while more than one is loaded."""
    if len(case.loaded) < 2 or all(entry.pinned for entry in case.loaded):
        return None
    order = lru_first(case.loaded)
    victim = next((entry for entry in order if not entry.pinned), None)
    if victim is None:
        victim = min((entry for entry in case.loaded if not entry.pinned), key=lru_key)
        order[-1] = victim
    idle = "it has requests, which are aborted" if victim.busy else unused_for(victim, case.now_s)
    reason = f"{case.over_text}; `{victim.name}` is the least recently used model that is not pinned ({idle})"
    return case.answer("unload", Unload(victim.name), reason, candidates=_candidates(order, victim))


def abort_single(case: Case) -> Decision | None:
    """R7: the only loaded model stays; aborting its requests frees their KV caches."""
    if len(case.loaded) != 1 or not case.loaded[0].running:
        return None
    if case.wanted is None and case.pressure_bytes <= case.limits.tolerated_bytes:
        return None  # aborting has not helped before; what is small is let through (R9)
    only = case.loaded[0]
    reason = (
        f"{case.over_text}; `{only.name}` is the only loaded model and stays,"
        f" its requests are aborted (KV cache {format_bytes(only.kv_bytes)})"
    )
    chosen = Candidate(only.name, True, "the only loaded model", only.weights_bytes, only.last_used_s)
    return case.answer("abort_requests", AbortRequests(only.name), reason, candidates=(chosen,))


def abort_pinned(case: Case) -> Decision | None:
    """Beyond R9, above the *hard* limit only: the process dies of an allocation that the machine cannot give
    (a signal on the CPU, an uncatchable abort on Metal), and then every request is lost; aborting some is cheaper."""
    hard_bytes = case.limits.hard_bytes
    busy = [entry for entry in case.loaded if entry.running]
    if not hard_bytes or case.pressure_bytes <= hard_bytes or not busy:
        return None
    busiest = min(busy, key=lambda entry: (-entry.kv_bytes, -entry.running, entry.name))
    reason = (
        f"{case.over_text} and over the hard limit {format_bytes(hard_bytes)}; all loaded models are pinned,"
        f" so the requests of `{busiest.name}` are aborted (KV cache {format_bytes(busiest.kv_bytes)})"
    )
    chosen = Candidate(busiest.name, True, "pinned, with the largest KV cache", busiest.weights_bytes, case.now_s)
    return case.answer("abort_pinned", AbortRequests(busiest.name), reason, candidates=(chosen,))


def report(case: Case) -> Decision:
    """R9: nothing is left to do; say which of the two it is."""
    if case.loaded and all(entry.pinned for entry in case.loaded):
        candidates = _candidates(lru_first(case.loaded), None)
        count = "the only loaded model is" if len(case.loaded) == 1 else f"all {len(case.loaded)} loaded models are"
        reason = f"{case.over_text}, and {count} pinned"
        return case.answer("report", None, reason, Outcome.ALL_PINNED, candidates)
    known_bytes = sum(entry.held_bytes for entry in case.loaded)
    what = f"`{case.loaded[0].name}` is the only loaded model and is idle" if case.loaded else "no model is loaded"
    if known_bytes > case.limits.soft_bytes:
        rest = f"its weights alone ({format_bytes(case.loaded[0].weights_bytes)}) are more than the limit"
    else:
        rest = f"{format_bytes(max(0, case.pressure_bytes - known_bytes))} are unaccounted for"
    reason = f"{case.over_text}; {what}, and {rest}"
    return case.answer("report", None, reason, Outcome.UNACCOUNTED)


REFERENCE: Final[tuple[Rung, ...]] = (
    drop_cache,
    system_short,
    within_limit,
    only_at_rest,
    await_unloading,
    unload_lru,
    abort_single,
    cancel_load,
    abort_pinned,
    report,
)


def _candidates(order: list[EntrySnapshot], victim: EntrySnapshot | None) -> tuple[Candidate, ...]:
    def why(entry: EntrySnapshot) -> str:
        if entry is victim:
            return "least recently used and not pinned"
        if entry.pinned:
            return "pinned"
        return "busy" if entry.busy else "used more recently"

    return tuple(
        Candidate(entry.name, entry is victim, why(entry), entry.weights_bytes, entry.last_used_s) for entry in order
    )
