"""Decision records: what a decision caused carries its id, and the record says what it cost."""

from __future__ import annotations

from omlxd.core.errors import DoesNotFit, InvalidRequest, RequestAborted
from omlxd.core.events import EventName
from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.snapshot import Limits
from omlxd.daemon.decisions import KEPT_DECISIONS, DecisionLog, DecisionRecord
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, until_decoding

RECORD = DecisionRecord("limit", "unload", "unload", "a", "why", MemoryReading(), MemoryReading())


@on_virtual_time
async def test_an_unload_and_the_requests_it_ends_carry_the_decision_s_id_and_the_record_names_them() -> None:
    scene = Scene({"a": 400, "b": 400}, answer_tokens=10_000)
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000, poll_interval=3600.0, policy=Policy.REFERENCE)
        enforcer.start()
        await pool.load("b")
        lost = pool.generate("a", prompt="hello", max_tokens=10_000)
        kept = pool.generate("b", prompt="hello", max_tokens=10_000)
        await until_decoding(lost)
        await until_decoding(kept)
        enforcer.max_bytes = 500 * MIB
        await enforcer.settle()
        assert isinstance(lost.error, RequestAborted)
        await kept.aclose()
    (decision,) = scene.named(EventName.DECISION)
    (unloaded,) = scene.named(EventName.UNLOADED)
    ended = {event.request: event for event in scene.named(EventName.REQUEST_ABORTED)}
    assert decision.fields["requests"] == [lost.id]
    assert unloaded.decision == ended[lost.id].decision == decision.decision == lost.error.details["decision"]
    assert ended[kept.id].decision is None


@on_virtual_time
async def test_a_load_names_the_request_it_is_for_and_so_does_what_was_evicted_for_it() -> None:
    scene = Scene({"a": 400, "b": 400}, step_s=0.01)
    async with scene.pool as pool:
        scene.enforcer(500, poll_interval=3600.0).start()
        await pool.load("a")
        request = pool.generate("b", prompt="hello")
        await request.text()
    by_hand, for_request = scene.named(EventName.LOAD_STARTED)
    assert (by_hand.request, for_request.request) == (None, request.id)
    (decision,) = scene.named(EventName.DECISION)
    assert (decision.fields["for_model"], decision.fields["for_request"]) == ("b", request.id)
    (waiting,) = scene.named(EventName.REQUEST_WAITING)
    assert (waiting.request, waiting.fields["reason"]) == (request.id, "`b` is not loaded")
    (started,) = scene.named(EventName.REQUEST_STARTED)
    assert started.fields["waited_s"] > 0


@on_virtual_time
async def test_an_unload_that_a_user_asked_for_carries_no_decision() -> None:
    scene = Scene({"a": 400})
    async with scene.pool as pool:
        await pool.load("a")
        await pool.unload("a")
    (unloaded,) = scene.named(EventName.UNLOADED)
    assert unloaded.decision is None


@on_virtual_time
async def test_what_can_never_run_is_refused_and_what_breaks_has_failed() -> None:
    scene = Scene({"a": 400, "huge": 4000}, context_length=8)
    async with scene.pool as pool:
        scene.enforcer(500, poll_interval=3600.0).start()
        for name, prompt in (("a", "one two three " * 20), ("huge", "hello")):
            generation = pool.generate(name, prompt=prompt)
            await generation.wait_ended()
            assert isinstance(generation.error, InvalidRequest | DoesNotFit)
    assert [event.model for event in scene.named(EventName.REQUEST_REFUSED)] == ["a", "huge"]
    assert not scene.named(EventName.REQUEST_FAILED)


def test_an_id_is_never_given_twice_whether_it_was_used_or_not() -> None:
    log = DecisionLog(lambda event: None)
    assert log.begin() == "d1"  # and came to nothing
    log.cost("d1", "r1")
    second = log.begin()
    log.cost("d1", "r2")
    log.cost(second, "r3")
    assert log.add(RECORD, Limits()) == "d3"
    assert log.count == 1
    assert log.recent[0]["requests"] == []


def test_the_last_decisions_are_kept() -> None:
    log = DecisionLog(lambda event: None, clock=lambda: 12.5)
    for _ in range(KEPT_DECISIONS + 3):
        log.add(RECORD, Limits())
    assert [each["decision"] for each in log.recent] == [f"d{n}" for n in range(4, KEPT_DECISIONS + 4)]


def test_what_is_gathered_is_all_that_was_decided_meanwhile_and_nothing_else() -> None:
    log = DecisionLog(lambda event: None)
    log.add(RECORD, Limits())
    with log.gathered() as outer, log.gathered() as inner:
        for _ in range(KEPT_DECISIONS + 3):
            log.add(RECORD, Limits())
    log.add(RECORD, Limits())
    assert [each["decision"] for each in outer] == [f"d{n}" for n in range(2, KEPT_DECISIONS + 5)]
    assert inner == outer
