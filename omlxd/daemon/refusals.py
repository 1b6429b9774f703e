"""What requests and loads are told when they cannot go on, in one voice: the reason with numbers, and the next step."""

from __future__ import annotations

from collections.abc import Sequence

from omlxd.core.admission import Admission, Ask
from omlxd.core.errors import (
    Busy,
    DoesNotFit,
    LoadCancelled,
    OmlxError,
    PrefillMemoryExceeded,
    RequestAborted,
    ShuttingDown,
    UnknownModel,
    from_json,
)
from omlxd.core.memory import MemoryReading
from omlxd.core.room import Room, RoomKind, missing_text
from omlxd.core.snapshot import Limits
from omlxd.core.units import format_bytes
from omlxd.core.wording import named, nearest, shown
from omlxd.engine.orders import MIB


def fresh(error: OmlxError) -> OmlxError:
    """The same error anew: one exception raised in many tasks would collect all their frames, and what they hold."""
    anew = from_json(error.to_json())
    anew.logged = error.logged
    return anew


def aborted(model: str, reason: str, decision: str | None = None) -> RequestAborted:
    """A request had to give way; `reason` completes "the request to `model` was aborted: ..."."""
    message, details = f"the request to `{model}` was aborted: {reason}", {"retry_after_s": 5.0}
    if decision is None:
        return RequestAborted(message, hint="send it again", details=details)
    hint = f"send it again; `omlxd why {decision}` says what it gave way to"
    return RequestAborted(message, hint=hint, details={**details, "decision": decision})


def cancelled(model: str, reason: str, decision: str | None = None) -> LoadCancelled:
    """A load was stopped; `reason` completes "the load of `model` was cancelled: ..."."""
    details = {} if decision is None else {"decision": decision}
    return LoadCancelled(f"the load of `{model}` was cancelled: {reason}", hint="try again", details=details)


def decision_behind(error: OmlxError) -> str | None:
    """The id of the decision that this error is the consequence of, None when nobody decided it."""
    decision = error.details.get("decision")
    return decision if isinstance(decision, str) else None


def shutting_down(*, restarting: bool = False) -> ShuttingDown:
    """Nothing new is taken."""
    if restarting:
        return ShuttingDown("omlxd is being restarted", hint="send it again in a moment")
    return ShuttingDown("omlxd is shutting down", hint="start it again with `omlxd start`")


def unknown(name: str, known: tuple[str, ...]) -> UnknownModel:
    """There is no such model; the hint is the nearest name."""
    near = nearest(name, known)
    hint = f"did you mean `{near}`?" if near else "`omlxd models` lists the models"
    return UnknownModel(f"there is no model `{shown(name)}`", hint=hint, details={"model": shown(name)})


def too_many_wait(model: str, waiting: int) -> Busy:
    """One request more than may wait for a model."""
    return Busy(
        f"{waiting} requests wait for `{model}` already",
        hint="try again in a few seconds",
        details={"model": model, "waiting": waiting, "retry_after_s": 5.0},
    )


def weights_alone(model: str, weights_bytes: int, limits: Limits) -> DoesNotFit:
    """R7 keeps the last model, but nothing can run beside weights that are over the limit by themselves."""
    return DoesNotFit(
        f"the weights of `{model}` ({format_bytes(weights_bytes)}) alone are over the soft limit"
        f" {format_bytes(limits.soft_bytes)} ({limits.set_by})",
        hint="raise the limit with `omlxd limit`",
        details={"model": model, "need_bytes": weights_bytes, "limit_bytes": limits.soft_bytes},
    )


def prompt_too_large(ask: Ask, answer: Admission) -> PrefillMemoryExceeded:
    """The prompt could not run even alone: the estimate, the limit, what binds, and the one thing to do (R11)."""
    longest = answer.longest_prompt_tokens
    if answer.binding == "pinned":
        hint = _unpin(answer.blockers)
    elif answer.raise_to_bytes is not None:
        hint = f"raise the limit with `omlxd limit {-(-answer.raise_to_bytes // MIB)}M`"
        hint += f", or send at most {longest} tokens" if longest else ""
    elif longest:
        hint = f"shorten the prompt to at most {longest} tokens"
    else:
        hint = "use a smaller or more quantised model"
    return PrefillMemoryExceeded(
        answer.why,
        hint=hint,
        details={
            "model": ask.model,
            "prompt_tokens": ask.prompt_tokens,
            "estimated_bytes": answer.need_bytes,
            "limit_bytes": answer.limit_bytes,
            "binding": answer.binding,
            "longest_prompt_tokens": longest,
            **({"pinned": list(answer.blockers)} if answer.binding == "pinned" else {}),
        },
    )


def no_room(model: str, answer: Admission, waited_s: float) -> Busy:
    """A request waited in vain for memory that nobody in the pool could give it."""
    what = "the system" if answer.binding == "system" else "memory that is not accounted for"
    return Busy(
        f"a request to `{model}` waited {waited_s:.0f} s for {what}: {answer.why}",
        hint="close other programs"
        if answer.binding == "system"
        else "`omlxd status` shows who holds it; try again later",
        details={
            "model": model,
            "short_bytes": answer.short_bytes,
            "limit_bytes": answer.limit_bytes,
            "binding": answer.binding,
            "retry_after_s": 10.0,
        },
    )


def parked_too_long(model: str, waited_s: float, refusal: OmlxError | None = None) -> Busy:
    """A parked request did not fit again before its deadline; `refusal` says what kept it out to the end."""
    because = "" if refusal is None else f": {refusal.message}"
    hint = None if refusal is None else refusal.hint
    return Busy(
        f"a request to `{model}` was parked for {waited_s:.0f} s and did not fit again (`park_deadline`){because}",
        hint=hint or "try again later, or raise the limit with `omlxd limit`",
        details={"model": model, "retry_after_s": 10.0},
    )


def system_short(model: str, reading: MemoryReading, limits: Limits) -> Busy:
    """Other programs leave the system less than `min_available`: nothing is loaded then."""
    available, least = reading.system_available_bytes, limits.min_available_bytes
    return Busy(
        f"`{model}` is not loaded while the system has {format_bytes(available)} available,"
        f" less than `min_available` {format_bytes(least)} (system)",
        hint="close other programs, or lower `min_available` in the manifest",
        details={"model": model, "available_bytes": available, "limit_bytes": least, "binding": "system"},
    )


def larger_than_predicted(model: str, weights_bytes: int, predicted_bytes: int, limits: Limits) -> Busy:
    """The weights turned out larger than was reserved, and the others' memory is not theirs to take."""
    return Busy(
        f"`{model}` took {format_bytes(weights_bytes)} where {format_bytes(predicted_bytes)} were predicted, more than"
        f" the soft limit {format_bytes(limits.soft_bytes)} ({limits.set_by}) leaves, and was unloaded again",
        hint="try again: its size is known now",
        details={"model": model, "weights_bytes": weights_bytes, "predicted_bytes": predicted_bytes},
    )


def does_not_fit(model: str, room: Room) -> DoesNotFit:
    """The model can never be loaded under these limits and pins."""
    details = {"model": model, **_numbers(room), "binding": room.binding}
    if room.binding != "pinned":
        hint = "raise the limit with `omlxd limit`, or use a smaller or more quantised model"
        return DoesNotFit(room.why, hint=hint, details=details)
    hint = f"{_unpin(room.blockers)}, or raise the limit with `omlxd limit`"
    return DoesNotFit(room.why, hint=hint, details={**details, "pinned": list(room.blockers)})


def no_room_beside(model: str, room: Room, loaded: Sequence[str]) -> DoesNotFit:
    """A preload takes nobody's memory."""
    names = f" beside {named(loaded)}" if loaded else ""
    return DoesNotFit(
        f"`{model}` was not preloaded: it needs {missing_text(room.need_bytes, room.short_bytes)}{names}",
        hint="raise the limit with `omlxd limit`, or preload less; it is loaded when somebody asks for it",
        details={"model": model, **_numbers(room), "short_bytes": room.short_bytes, "binding": room.binding},
    )


def still_busy(model: str, room: Room, waited_s: float) -> Busy:
    """Others held the load's memory for as long as it may wait."""
    who = named(room.blockers) if room.blockers else "memory that is not accounted for"
    numbers = {"blockers": list(room.blockers), "short_bytes": room.short_bytes, "retry_after_s": 10.0}
    return Busy(
        f"`{model}` waited {waited_s:.0f} s for {format_bytes(room.short_bytes)} that {who} still holds",
        hint="try again later, or `omlxd unload` a model",
        details={"model": model, **_numbers(room), **numbers},
    )


def nobody_asks(model: str, room: Room) -> LoadCancelled:
    """Nobody makes way for a load that nobody waits for."""
    if room.kind is RoomKind.WAIT:
        return cancelled(
            model, f"it would have to wait for {named(room.blockers) or 'memory'}, and nobody asks for it any more"
        )
    return cancelled(model, f"{named(room.victims)} would have to make way, and nobody asks for it any more")


def _unpin(names: Sequence[str]) -> str:
    return f"unpin {'one of ' if len(names) > 1 else ''}{named(names)}"


def _numbers(room: Room) -> dict[str, int]:
    return {"need_bytes": room.need_bytes, "used_bytes": room.used_bytes, "limit_bytes": room.limit_bytes}
