"""What loads and requests wait for now, in the words that `status` and clients are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omlxd.core.states import EntryState, RequestState
from omlxd.core.units import format_bytes, format_left
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.load_ticket import NO_NOTE
from omlxd.daemon.request import Generation

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


def load_waits(pool: EnginePool, entry: EnginePoolEntry) -> str | None:
    """What the entry's load waits for; None when it has none, or has begun."""
    if entry.ticket is None or entry.state is EntryState.LOADING:
        return None
    if entry.ticket.note not in (None, NO_NOTE):
        return entry.ticket.note
    before = pool.loads.in_progress
    return NO_NOTE if before is None else f"waiting for `{before}` to be loaded first"


def request_waits(pool: EnginePool, generation: Generation) -> str | None:
    """What a request waits for; None while it runs."""
    if generation.state not in (RequestState.WAITING, RequestState.PARKED):
        return None
    entry = pool.entries[generation.model]
    if generation.waits_for is not None:
        return generation.waits_for
    if entry.state is EntryState.LOADING:
        return f"waiting for `{entry.name}` to be loaded"
    if (load := load_waits(pool, entry)) is not None:
        return f"waiting for `{entry.name}` to be loaded: {load}"
    if entry.gives_way:
        return f"waiting for the next turn of `{entry.name}`: it makes way for another model"
    if entry.state is EntryState.UNLOADING:
        return f"waiting for `{entry.name}` to be unloaded and loaded again"
    return "waiting for memory" if generation.state is RequestState.PARKED else "waiting for its turn"


def progress_words(pool: EnginePool, generation: Generation) -> str:
    """What a request does or waits for, with how far that is, for who waits for its first token."""
    entry = pool.entries.get(generation.model)
    if entry is None:
        return "working"  # it has just ended, and its model is gone from the manifest
    if entry.state is EntryState.LOADING and entry.ticket is not None:
        status = entry.ticket.status
        left = f", {format_left(status.left_s)}" if status.left_s is not None else ""
        done = 100 * status.done_bytes // max(1, status.total_bytes)
        return f"loading {entry.name} {done}% of {format_bytes(status.total_bytes)}{left}"
    if generation.state is RequestState.PREFILL and generation.prompt_tokens:
        done, tokens = generation.prefilled_tokens, generation.prompt_tokens
        return f"reading the prompt {100 * done // tokens}% of {tokens} tokens"
    return request_waits(pool, generation) or "working"
