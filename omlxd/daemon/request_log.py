"""What the log hears of requests: when they start, are parked, go on and end, each with its numbers and its cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omlxd.core.errors import DoesNotFit, InvalidRequest, OmlxError, RequestAborted
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.daemon.decisions import DecisionLog
from omlxd.daemon.refusals import decision_behind
from omlxd.daemon.request import Cut, Generation

TOLD_AFTER_S: Final = 1.0
"""Who waits for less than this behind others is not worth a line."""


class RequestLog:
    """Tells `emit` of one pool's requests, and sets down to a decision whom it cost what."""

    def __init__(self, emit: Emit, decisions: DecisionLog) -> None:
        self._emit, self._decisions = emit, decisions

    def runs(self, generation: Generation, parked_s: float | None) -> None:
        """The engine has begun with it: once that it has started, and each time that it goes on after it was parked."""
        if not generation.started:
            generation.started = True
            fields = {"prompt_tokens": generation.prompt_tokens, "waited_s": generation.age_s}
            self._tell(EventName.REQUEST_STARTED, generation, fields)
        if parked_s is not None:
            counts = {"generated_tokens": generation.generated_tokens, "parks": generation.parks}
            self._tell(EventName.REQUEST_RESUMED, generation, {**counts, "parked_s": parked_s})

    def waits(self, generation: Generation, reason: str) -> None:
        """It waits on, for another reason than at first."""
        fields = {"reason": reason, "waited_s": round(generation.age_s, 3)}
        self._tell(EventName.REQUEST_WAITING, generation, fields)

    def parked(self, generation: Generation, promised_bytes: int, cut: Cut) -> None:
        """It gave up the `promised_bytes` that were reserved for it and waits until it fits again."""
        self.cost(generation, cut.decision)
        fields = {
            "reason": cut.why,
            "prompt_tokens": generation.prompt_tokens,
            "generated_tokens": generation.generated_tokens,
            "promised_bytes": promised_bytes,
            "parks": generation.parks,
        }
        self._tell(EventName.REQUEST_PARKED, generation, fields, decision=cut.decision)

    def finished(self, generation: Generation, cut: Cut | None) -> None:
        """It ended well; `cut` says what kept it from going on."""
        fields = {
            "finish_reason": None if generation.finish_reason is None else generation.finish_reason.value,
            "prompt_tokens": generation.prompt_tokens,
            "generated_tokens": generation.generated_tokens,
            "first_token_s": generation.first_token_s,
            "tokens_per_s": generation.tokens_per_s,
            "age_s": generation.age_s,
            "parks": generation.parks,
            **({} if cut is None else {"reason": cut.why}),
        }
        decision = None if cut is None else cut.decision
        self._tell(EventName.REQUEST_FINISHED, generation, fields, decision=decision)

    def failed(self, generation: Generation, error: OmlxError) -> None:
        """It ended with an error; set down to the decision that ended it."""
        decision = decision_behind(error)
        self.cost(generation, decision)
        name = EventName.REQUEST_FAILED
        if isinstance(error, RequestAborted):
            name = EventName.REQUEST_ABORTED
        elif isinstance(error, InvalidRequest | DoesNotFit):
            name = EventName.REQUEST_REFUSED
        level = EventLevel.WARNING if name is EventName.REQUEST_FAILED else EventLevel.INFO
        fields = {
            "error": error.to_log(),
            "prompt_tokens": generation.prompt_tokens,
            "generated_tokens": generation.generated_tokens,
            "age_s": generation.age_s,
        }
        self._tell(name, generation, fields, level, decision)

    def cost(self, generation: Generation, decision: str | None) -> None:
        """The decision, if there was one, took the request out."""
        if decision is not None:
            self._decisions.cost(decision, generation.id)

    def _tell(
        self,
        name: EventName,
        generation: Generation,
        fields: Mapping[str, object],
        level: EventLevel = EventLevel.INFO,
        decision: str | None = None,
    ) -> None:
        self._emit(Event(name, level, model=generation.model, request=generation.id, decision=decision, fields=fields))
