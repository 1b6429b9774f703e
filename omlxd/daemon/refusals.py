"""What requests and loads are told when they cannot go on, in one voice: the reason with numbers, and the next step."""

from __future__ import annotations

from omlxd.core.errors import (
    Busy,
    DoesNotFit,
    LoadCancelled,
    OmlxError,
    RequestAborted,
    ShuttingDown,
    UnknownModel,
    from_json,
)
from omlxd.core.policy import Limits
from omlxd.core.room import Room
from omlxd.core.units import format_bytes
from omlxd.core.wording import nearest, shown


def fresh(error: OmlxError) -> OmlxError:
    """The same error anew: one exception raised in many tasks would collect all their frames, and what they hold."""
    return from_json(error.to_json())


def aborted(model: str, reason: str) -> RequestAborted:
    """A request had to give way; `reason` completes "the request to `model` was aborted: ..."."""
    return RequestAborted(
        f"the request to `{model}` was aborted: {reason}", hint="send it again", details={"retry_after_s": 5.0}
    )


def cancelled(model: str, reason: str) -> LoadCancelled:
    """A load was stopped; `reason` completes "the load of `model` was cancelled: ..."."""
    return LoadCancelled(f"the load of `{model}` was cancelled: {reason}", hint="try again")


def shutting_down() -> ShuttingDown:
    """Nothing new is taken."""
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
        f" {format_bytes(limits.soft_bytes)} ({limits.binding})",
        hint="raise the limit with `omlxd limit`",
        details={"model": model, "need_bytes": weights_bytes, "limit_bytes": limits.soft_bytes},
    )


def does_not_fit(model: str, room: Room) -> DoesNotFit:
    """The model can never be loaded under these limits and pins."""
    hint = (
        "unpin a model, or raise the limit with `omlxd limit`"
        if room.binding == "pinned"
        else "raise the limit with `omlxd limit`, or use a smaller or more quantised model"
    )
    return DoesNotFit(room.why, hint=hint, details={"model": model, **_numbers(room), "binding": room.binding})


def still_busy(model: str, room: Room, waited_s: float) -> Busy:
    """Others held the load's memory for as long as it may wait."""
    who = ", ".join(f"`{name}`" for name in room.blockers) if room.blockers else "memory that is not accounted for"
    numbers = {"blockers": list(room.blockers), "short_bytes": room.short_bytes, "retry_after_s": 10.0}
    return Busy(
        f"`{model}` waited {waited_s:.0f} s for {format_bytes(room.short_bytes)} that {who} still holds",
        hint="try again later, or `omlxd unload` a model",
        details={"model": model, **_numbers(room), **numbers},
    )


def _numbers(room: Room) -> dict[str, int]:
    return {"need_bytes": room.need_bytes, "used_bytes": room.used_bytes, "limit_bytes": room.limit_bytes}
