"""What the engine's thread tells of its steps: events in order, and of each request one end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from omlxd.core.errors import OmlxError
from omlxd.core.states import FinishReason
from omlxd.engine import mishaps
from omlxd.engine.events import EngineEvent, Finished, Generated, RequestFailed, RequestGone, StepFailed
from omlxd.engine.grammars import guide_failed
from omlxd.engine.running import Running

_Event = TypeVar("_Event", bound=EngineEvent)
_Figures = ParamSpec("_Figures")


class Report:
    """Events, from where they happen to whoever sends them on.

    Args:
        kv_bytes_of: what a model's KV caches take now, in bytes.

    Attributes:
        events: what happened since it was last taken, in order.
        ended: requests that have had their end told, or are about to, and that the plan still names.
    """

    def __init__(self, kv_bytes_of: Callable[[str], int]) -> None:
        self.events: list[EngineEvent] = []
        self.ended: set[str] = set()
        self._kv_bytes_of = kv_bytes_of
        self._finished: list[tuple[str, FinishReason | OmlxError, str | None, int]] = []
        self._seq = 0

    def tell(
        self,
        event: Callable[Concatenate[int, _Figures], _Event],
        *figures: _Figures.args,
        **named: _Figures.kwargs,
    ) -> _Event:
        """Something happened: the event with its number, which is told next."""
        self._seq += 1
        self.events.append(told := event(self._seq, *figures, **named))
        return told

    def take(self) -> tuple[EngineEvent, ...]:
        """The events, which are not told again."""
        events, self.events = self.events, []
        return tuple(events)

    def token(self, request: Running, token: int) -> bool:
        """A request has a token more; whether it goes on. Its end is told by `finished`."""
        name = request.order.request
        try:
            text, reason = request.accept(token)
        except Exception as error:  # of this request alone: its sampler's, or its text's
            self.stumbled(request.order.model, "token", error)
            self._end(name, mishaps.failure(request.order.model, error))
            return False
        ids = () if token in request.end_ids else (token,)
        logprob = request.logprob()
        logprobs = (logprob,) if logprob is not None and ids else ()
        self.tell(Generated, name, text, len(ids), ids, logprobs, request.text.held_characters)
        end: FinishReason | OmlxError | None = reason
        if request.problem and (reason is None or not ids):
            end = guide_failed(request.order.model, request.problem)
        if end is None:
            return True
        self._end(name, end, request.text.stopped_by, self._kv_bytes_of(request.order.model))
        return False

    def finished(self) -> None:
        """Tell who ended in a step: only after it, when the KV caches of those who finished in it are free."""
        finished, self._finished = self._finished, []
        for name, end, stop, kv_bytes in finished:
            if isinstance(end, OmlxError):
                self.failed(name, end)
            else:
                self.tell(Finished, name, end, stop, kv_bytes)

    def failed(self, request: str, error: OmlxError) -> None:
        """A request ended with an error."""
        error.__traceback__ = None  # its frames hold arrays
        self.ended.add(request)
        self.tell(RequestFailed, request, error)

    def gone(self, requests: list[str]) -> None:
        """Requests are out of the engine, and their memory is back."""
        for request in requests:
            self.tell(RequestGone, request)

    def stumbled(self, model: str | None, step: str, error: Exception) -> None:
        """A step raised what nobody expected."""
        what = type(error).__name__ if mishaps.may_quote(error) else f"{type(error).__name__}: {error}"
        self.tell(StepFailed, model, step, what, mishaps.frames(error))

    def _end(
        self, request: str, end: FinishReason | OmlxError, stopped_by: str | None = None, kv_bytes: int = 0
    ) -> None:
        self.ended.add(request)
        self._finished.append((request, end, stopped_by, kv_bytes))
