"""The graceful ladder: nothing is lost while anything cheaper is left.

Caches go before idle models, idle models before loads, loads before models whose requests wait anyway, and those before
a running request is parked. The newest request is parked first and the oldest last; an abort is what is left above the
hard limit, when the alternative is that the process dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Final

from omlxd.core.case import MAX_CANDIDATES, Case, Rung, lru_first, lru_order
from omlxd.core.choice import necessary
from omlxd.core.decision import AbortRequests, Decision, Outcome, Park, Unload
from omlxd.core.rungs import (
    await_unloading,
    cancel_load,
    drop_cache,
    model_candidates,
    only_at_rest,
    system_short,
    trim_prefix_caches,
    unload_idle,
    victims_of,
    within_limit,
)
from omlxd.core.snapshot import Candidate, EntrySnapshot, RequestSnapshot
from omlxd.core.units import format_bytes

PARKED_ENOUGH: Final = 3
"""A request that was parked so often is passed over as long as another one was parked less often."""


def unload_waiting(case: Case) -> Decision | None:
    """Rung 4b: a model whose requests all wait or are parked; they survive, and load it again when it fits."""
    if len(case.loaded) < 2:
        return None
    waiting = [each for each in case.loaded if each.waiting and not each.running and _only_waited_for(each)]
    if not waiting:
        return None
    waiting = lru_order(waiting)
    chosen = victims_of(case, waiting, case.short_bytes) or waiting[: len(case.loaded) - 1]
    victim = chosen[0]
    count = "its request waits" if victim.waiting == 1 else f"its {victim.waiting} requests wait"
    reason = f"{case.over_text}; none of `{victim.name}`'s requests runs, and {count} until it is loaded again"
    candidates = model_candidates(case, victim, chosen, "none of its requests runs")
    return case.answer("unload_waiting", Unload(victim.name), reason, candidates=candidates)


def park(case: Case) -> Decision | None:
    """Rung 5: a running request, of the shortest newest-first prefix that suffices; the oldest last.

    Nothing is parked for a block that the oldest itself wants: then it would have to give way to itself.
    """
    if case.wanted is None and _is_tolerated(case):
        return None  # it has not helped before; what is small is let through (R9)
    running = _running(case.loaded)
    if not running:
        return None
    oldest, whose = running[0], {request.request: entry for entry in case.loaded for request in entry.requests}
    order = _parking_order(case, running[1:], whose)
    if order:
        chosen = necessary(order, case.short_bytes, _FREES) or order
        victim, why = chosen[0], _why_parked(chosen, order)
    elif case.wanted is None and oldest.frees_bytes > 0 and not _is_futile(case, oldest, whose):
        chosen, victim, why = [oldest], oldest, "the last one that runs, and does not fit alone"
    else:
        return None
    model = whose[victim.request].name
    reason = (
        f"{case.over_text}; request {victim.request} to `{model}` is parked and goes on when it"
        f" fits (it is {why}, and frees {format_bytes(victim.frees_bytes)})"
    )
    candidates = _request_candidates(case, running, order, chosen, why, whose)
    return case.answer("park", Park(model, victim.request), reason, candidates=candidates)


def unload_last(case: Case) -> Decision | None:
    """Rung 5b: the last model stays loaded, unless its weights alone are over the limit and nothing of it runs."""
    if len(case.loaded) != 1:
        return None
    last = case.loaded[0]
    if last.pinned or last.running or last.weights_bytes <= case.limits.soft_bytes:
        return None
    reason = (
        f"{case.over_text}; nothing of `{last.name}` runs, and its weights alone ({format_bytes(last.weights_bytes)})"
        " are more than the limit"
    )
    candidates = model_candidates(case, last, (last,), "its weights alone are more than the limit")
    return case.answer("unload_last", Unload(last.name), reason, candidates=candidates)


def abort_over_hard(case: Case) -> Decision | None:
    """Rung 6, above the *hard* limit only: the process dies of an allocation that the machine cannot give (a signal
    on the CPU, an uncatchable abort on Metal), and then every request is lost; aborting some is cheaper."""
    hard_bytes, read_bytes = case.limits.hard_bytes, case.reading.pressure_bytes(case.limits.policy)
    busy = [entry for entry in case.loaded if entry.running]
    if not hard_bytes or read_bytes <= hard_bytes or not busy or case.wanted is not None:
        return None
    busiest = min(busy, key=lambda entry: (-entry.kv_bytes, -entry.running, entry.name))
    reason = (
        f"{case.over_text}; that is over the hard limit {format_bytes(hard_bytes)} too, and nobody else can give way,"
        f" so the requests of `{busiest.name}` are aborted (KV cache {format_bytes(busiest.kv_bytes)})"
    )
    chosen = Candidate(busiest.name, True, "with the largest KV cache", busiest.weights_bytes, busiest.last_used_s)
    return case.answer("abort_requests", AbortRequests(busiest.name), reason, candidates=(chosen,))


def report(case: Case) -> Decision:
    """Rung 7, R9: nothing is left to do; say why."""
    order = lru_first(case.loaded)
    candidates = tuple(
        Candidate(entry.name, False, _why_kept(entry), entry.weights_bytes, entry.last_used_s) for entry in order
    )
    if case.loaded and all(entry.pinned for entry in case.loaded):
        count = "the only loaded model is" if len(case.loaded) == 1 else f"all {len(case.loaded)} loaded models are"
        reason = f"{case.over_text}, and {count} pinned"
        return case.answer("report", None, reason, Outcome.ALL_PINNED, candidates)
    known_bytes = sum(entry.held_bytes for entry in case.loaded)
    names = ", ".join(f"`{entry.name}`" for entry in order[:3])
    what = f"nothing of {names} can give way" if case.loaded else "no model is loaded"
    reason = f"{case.over_text}; {what}"
    if known_bytes <= case.limits.soft_bytes and case.wanted is None:
        reason += f", and {format_bytes(max(0, case.pressure_bytes - known_bytes))} are unaccounted for"
    return case.answer("report", None, reason, Outcome.UNACCOUNTED, candidates)


GRACEFUL: Final[tuple[Rung, ...]] = (
    drop_cache,
    system_short,
    within_limit,
    only_at_rest,
    await_unloading,
    trim_prefix_caches,
    unload_idle,
    cancel_load,
    unload_waiting,
    park,
    unload_last,
    abort_over_hard,
    report,
)


_ORDER, _ID, _FREES = attrgetter("order"), attrgetter("request"), attrgetter("frees_bytes")
_AGE = attrgetter("order", "request")
"""Older is smaller; a tie goes by name."""


def _running(loaded: Sequence[EntrySnapshot]) -> list[RequestSnapshot]:
    """All requests that the engine has begun, the oldest first, a tie by name."""
    running = [request for entry in loaded for request in _begun(entry)]
    if len(set(map(_ORDER, running))) < len(running):
        running.sort(key=_ID)
    running.sort(key=_ORDER)
    return running


def _begun(entry: EntrySnapshot) -> Sequence[RequestSnapshot]:
    """Its requests; when nothing is promised for any, since nobody knows what they take, each frees its share."""
    requests = [request for request in entry.requests if request.begun]
    if not entry.kv_bytes or not requests or any(each.frees_bytes for each in requests):
        return requests
    unknown_bytes = entry.kv_bytes // len(requests)
    return [replace(request, frees_bytes=unknown_bytes) for request in requests]


def _parking_order(
    case: Case, younger: Sequence[RequestSnapshot], whose: Mapping[str, EntrySnapshot]
) -> list[RequestSnapshot]:
    """The newest first, without those that would free nothing; those that were parked often after all others."""
    useful = [each for each in reversed(younger) if each.frees_bytes > 0]
    if case.futile:
        useful = [each for each in useful if not _is_futile(case, each, whose)]
    often = [each for each in useful if each.parks >= PARKED_ENOUGH]
    if often:
        often.sort(key=lambda request: request.parks)
        useful = [each for each in useful if each.parks < PARKED_ENOUGH] + often
    return useful


def _is_futile(case: Case, request: RequestSnapshot, whose: Mapping[str, EntrySnapshot]) -> bool:
    return Park(whose[request.request].name, request.request) in case.futile


def _why_parked(chosen: Sequence[RequestSnapshot], order: Sequence[RequestSnapshot]) -> str:
    victim = chosen[0]
    often_parked = [each for each in order if each.parks >= PARKED_ENOUGH]  # they come last, whatever their age
    newest = max((order[0], *often_parked), key=_AGE)
    if victim is newest:
        return "the newest"
    often = newest.parks >= PARKED_ENOUGH > victim.parks
    if often:
        return "the newest that was not parked often"
    return "the newest that frees enough" if len(chosen) == 1 else "the newest of those that free enough together"


def _is_tolerated(case: Case) -> bool:
    """Over the soft limit only as far as nothing could be done about, and not over the hard one."""
    hard_bytes = case.limits.hard_bytes
    return case.pressure_bytes <= case.limits.tolerated_bytes and (not hard_bytes or case.pressure_bytes <= hard_bytes)


def _only_waited_for(entry: EntrySnapshot) -> bool:
    """Of one without running requests: whether it holds memory for requests that wait, and for nobody else."""
    return not entry.pinned and 0 < entry.waiting >= entry.leases


def _request_candidates(
    case: Case,
    running: Sequence[RequestSnapshot],
    order: Sequence[RequestSnapshot],
    chosen: Sequence[RequestSnapshot],
    why_chosen: str,
    whose: Mapping[str, EntrySnapshot],
) -> tuple[Candidate, ...]:
    """The victim, the others in the order in which they would be parked, those that cannot be, and the oldest."""
    victim, oldest, next_ones = chosen[0], running[0], {each.request for each in chosen}
    enough = f"{victim.request} is enough" if len(chosen) == 1 else f"{len(chosen)} others are enough together"

    def why(request: RequestSnapshot) -> str:
        if request is victim:
            return f"{why_chosen}, and frees {format_bytes(request.frees_bytes)}"
        if request is oldest:
            return "the oldest goes last"
        if request.frees_bytes <= 0:
            return "parking it frees nothing"
        if _is_futile(case, request, whose):
            return "could not be parked"
        if request.request in next_ones:
            return "next, should this not suffice"
        if request.parks >= PARKED_ENOUGH:
            return f"was parked {request.parks} times"
        return f"newer, but not needed: {enough}" if request.order > victim.order else "older"

    able = {each.request for each in order}
    unable = [each for each in running if each.request not in able] if len(order) < MAX_CANDIDATES else []
    others = (each for each in (*order[:MAX_CANDIDATES], *unable) if each is not victim and each is not oldest)
    shown = [victim, *islice(others, MAX_CANDIDATES - 2)]
    if oldest is not victim:
        shown.append(oldest)
    return tuple(
        Candidate(
            whose[request.request].name,
            request is victim,
            why(request),
            whose[request.request].weights_bytes,
            whose[request.request].last_used_s,
            request=request.request,
            frees_bytes=request.frees_bytes,
        )
        for request in shown
    )


def _why_kept(entry: EntrySnapshot) -> str:
    if entry.pinned:
        return "pinned"
    if entry.running:
        return "its requests run"
    return "in use" if entry.busy else "the last model stays loaded"
