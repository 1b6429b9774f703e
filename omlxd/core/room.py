"""Whether a model that is to be loaded fits, and if not, what may be given up for it: pure, and nothing is done here.

A load takes only what nobody uses: idle, unpinned models without a lease, least recently used first. What can never
fit is known before anything is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from omlxd.core.choice import necessary
from omlxd.core.idle_words import IdleChoice
from omlxd.core.snapshot import Candidate, EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from omlxd.core.units import format_bytes
from omlxd.core.wording import named


class RoomKind(StrEnum):
    """What stands between a model and its memory."""

    FITS = "fits"
    EVICT = "evict"
    WAIT = "wait"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Room:
    """The answer of `make_room`, with its numbers in bytes.

    Attributes:
        kind: load now, evict `victims` first, wait for `blockers`, or refuse.
        why: the reason in plain words with numbers.
        victims: the models to unload, least recently used first (`evict`).
        blockers: who must end or give way before it fits (`wait`), empty when memory is unaccounted for; or which
            pinned models keep it out (`never`).
        short_bytes: what is missing now.
        binding: the part of the limits that binds: `max_memory`, `ram`, `metal`, `pinned`, ...
        need_bytes: what the model takes.
        used_bytes: what counts as taken: the larger of what was read and what has been promised.
        limit_bytes: the limit it was compared with; 0 when nothing is enforced.
        candidates: every loaded model, and why it was or was not chosen.
    """

    kind: RoomKind
    why: str
    need_bytes: int
    used_bytes: int
    limit_bytes: int
    binding: str = "max_memory"
    victims: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    short_bytes: int = 0
    candidates: tuple[Candidate, ...] = ()


def make_room(snapshot: Snapshot, limits: Limits, model: str, need_bytes: int, prompt_tokens: int = 1) -> Room:
    """How `model`, which needs `need_bytes`, gets its memory under the soft limit.

    Without a soft limit only the hard one (what the machine can give) is looked at, and nothing is evicted.

    Args:
        snapshot: who holds what.
        limits: what is in force.
        model: which is not loaded.
        need_bytes: its weights, and what is to fit beside them.
        prompt_tokens: the prompt whose KV cache is part of that; 1 is what any request has.
    """
    others = tuple(entry for entry in snapshot.entries if entry.name != model)
    committed_bytes = sum(entry.committed_bytes for entry in others)
    # Prefix caches do not count: the plan that brings the load has them trimmed first.
    used_bytes = max(snapshot.reading.pressure_bytes(limits.policy) - snapshot.prefix_bytes, committed_bytes)
    limit_bytes = max(0, limits.soft_bytes) or max(0, limits.hard_bytes)
    needs = f"`{model}` needs" if prompt_tokens <= 1 else f"`{model}` with a prompt of {prompt_tokens} tokens needs"
    if (refusal := _never(others, limits, needs, need_bytes, used_bytes, limit_bytes)) is not None:
        return refusal
    short_bytes = used_bytes + need_bytes - limit_bytes
    if limits.soft_bytes <= 0 or short_bytes <= 0:
        free = f"{format_bytes(-short_bytes)} are left" if limits.soft_bytes > 0 else "no limit is enforced"
        why = f"{needs} {format_bytes(need_bytes)} and fits: {free}"
        return Room(RoomKind.FITS, why, need_bytes, used_bytes, limit_bytes, limits.binding)
    loaded = sorted((entry for entry in others if entry.state is EntryState.LOADED), key=_lru_key)
    idle = [entry for entry in loaded if _evictable(entry)]
    victims = shortest_prefix(idle, short_bytes)
    candidates = candidates_of(loaded, victims)
    need = f"{needs} {missing_text(need_bytes, short_bytes)}"
    if victims:
        names = named(entry.name for entry in victims)
        return Room(
            RoomKind.EVICT,
            f"{need}; {names} {IdleChoice(idle, victims).why_they_go}",
            need_bytes,
            used_bytes,
            limit_bytes,
            limits.binding,
            victims=tuple(entry.name for entry in victims),
            short_bytes=short_bytes,
            candidates=candidates,
        )
    blockers = tuple(
        entry.name
        for entry in others
        if entry.state in (EntryState.LOADING, EntryState.UNLOADING)
        or (entry.state is EntryState.LOADED and entry.busy and not entry.pinned)
    )
    who = f"it waits for {named(blockers)}" if blockers else "nobody can give way"
    return Room(
        RoomKind.WAIT,
        f"{need}; {who}",
        need_bytes,
        used_bytes,
        limit_bytes,
        limits.binding,
        blockers=blockers,
        short_bytes=short_bytes,
        candidates=candidates,
    )


def missing_text(need_bytes: int, short_bytes: int, are: str = "are", limit: str = "the limit") -> str:
    """`5.82 MiB and 2.00 MiB are missing`; more is missing than is needed when the limit was passed before.

    Args:
        are: `are` or `were`.
        limit: the limit in words.
    """
    need, short = format_bytes(need_bytes), format_bytes(short_bytes)
    if short_bytes <= need_bytes:
        return f"{need} and {short} {are} missing"
    must, over = "must" if are == "are" else "had to", format_bytes(short_bytes - need_bytes)
    return f"{need}; {short} {must} be freed for it, since {over} {are} already over {limit}"


def _never(
    others: Sequence[EntrySnapshot], limits: Limits, needs: str, need_bytes: int, used_bytes: int, limit_bytes: int
) -> Room | None:
    """The refusal when not even an otherwise empty machine would do: the model alone, or beside what is pinned."""
    if limit_bytes <= 0:
        return None
    name = "soft limit" if limits.soft_bytes > 0 else "hard limit"
    if need_bytes > limit_bytes:
        why = f"{needs} {format_bytes(need_bytes)}, more than the {name} {format_bytes(limit_bytes)} ({limits.set_by})"
        return Room(RoomKind.NEVER, why, need_bytes, used_bytes, limit_bytes, limits.binding)
    held = (EntryState.LOADED, EntryState.LOADING)
    pinned = [entry for entry in others if entry.pinned and entry.state in held]
    pinned_bytes = sum(entry.weights_bytes for entry in pinned)
    if limits.soft_bytes <= 0 or not pinned or pinned_bytes + need_bytes <= limit_bytes:
        return None
    names = named(entry.name for entry in pinned)
    why = (
        f"{needs} {format_bytes(need_bytes)} and pinned models hold {format_bytes(pinned_bytes)} ({names}),"
        f" together more than the {name} {format_bytes(limit_bytes)} ({limits.set_by})"
    )
    blockers = tuple(entry.name for entry in pinned)
    return Room(RoomKind.NEVER, why, need_bytes, used_bytes, limit_bytes, "pinned", blockers=blockers)


def _evictable(entry: EntrySnapshot) -> bool:
    return not entry.pinned and not entry.busy


def _lru_key(entry: EntrySnapshot) -> tuple[float, str]:
    return (entry.last_used_s, entry.name)


def shortest_prefix(idle: Sequence[EntrySnapshot], short_bytes: int) -> list[EntrySnapshot]:
    """The shortest prefix that frees `short_bytes`, less what can be spared of it; empty when all do not suffice."""
    return necessary(idle, short_bytes, lambda entry: entry.committed_bytes)


def candidates_of(loaded: Sequence[EntrySnapshot], victims: Sequence[EntrySnapshot]) -> tuple[Candidate, ...]:
    """The loaded models, and why each was or was not taken."""
    chosen = {entry.name for entry in victims}
    words = IdleChoice(filter(_evictable, loaded), victims)

    def why(entry: EntrySnapshot) -> str:
        if entry.name in chosen:
            return words.why_it_goes(entry)
        if entry.pinned:
            return "pinned"
        return "busy" if entry.busy else words.why_it_stays(entry)

    return tuple(
        Candidate(entry.name, entry.name in chosen, why(entry), entry.weights_bytes, entry.last_used_s)
        for entry in loaded
    )
