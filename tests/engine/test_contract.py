"""The contract of `omlxd.engine.protocol`, held against the fake engine and the real one alike."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from omlxd.core.errors import LoadCancelled, OmlxError
from omlxd.core.memory import MemoryReading
from omlxd.core.states import FinishReason
from omlxd.daemon.model_files import read_model_folder
from omlxd.engine.events import (
    EngineEvent,
    EngineStarted,
    Finished,
    Generated,
    LoadDone,
    LoadEnded,
    LoadProgress,
    NeedsBlock,
    OverLimit,
    Prefilled,
    RequestFailed,
    RequestGone,
    Unloaded,
)
from omlxd.engine.orders import MIB, EngineLimits, GenerationOrder, LoadOrder, Plan
from omlxd.engine.protocol import Engine
from tests.fakes.engine import FakeEngine

E = TypeVar("E", bound=EngineEvent)
DEADLINE_S = 60.0
ENDS = (Finished, RequestFailed, RequestGone)
LONG = tuple(1 + n % 50 for n in range(600))  # many steps of prefill, whatever the model says then


class Loop:
    """Plays the event loop's part: sends plans and collects what the engine posts."""

    def __init__(self, engine: Engine, folder: Path, weights_bytes: int) -> None:
        self.engine, self._folder, self.weights_bytes = engine, folder, weights_bytes
        self.plan = Plan(prefill_chunk_tokens=16)
        self.seen: list[EngineEvent] = []
        self._posted: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._orders = 0
        engine.start(lambda events: [self._posted.put(event) for event in events])

    @property
    def seen_seq(self) -> int:
        return self.seen[-1].seq if self.seen else 0

    def apply(self, **changes: Any) -> None:
        self.plan = replace(self.plan, **{"seen_seq": self.seen_seq, **changes})
        self.engine.apply(self.plan)

    def until(self, *kinds: type[E], request: str | None = None) -> E:
        """The next event of one of these kinds (about this request)."""
        while True:
            event = self._posted.get(timeout=DEADLINE_S)
            self.seen.append(event)
            if isinstance(event, kinds) and request in (None, getattr(event, "request", None)):
                return event

    def rest(self) -> MemoryReading:
        return self.engine.rest().result(DEADLINE_S)

    def fence(self) -> list[EngineEvent]:
        """Everything that comes of the plans sent so far, without waiting for more work."""
        self.rest()
        self.rest()
        news = []
        while not self._posted.empty():
            news.append(self._posted.get())
        self.seen += news
        return news

    def order(self, model: str = "m", path: Path | None = None) -> LoadOrder:
        self._orders += 1
        return LoadOrder(self._orders, model, str(path or self._folder), self.weights_bytes)

    def load(self, model: str = "m") -> LoadDone:
        self.apply(load=self.order(model))
        done = self.until(LoadDone)
        self.apply(load=None, resident=self.plan.resident | {model})
        return done

    def start(
        self,
        request: str,
        prompt: tuple[int, ...] = (5, 6, 7),
        max_tokens: int = 4,
        generated: tuple[int, ...] = (),
    ) -> None:
        order = GenerationOrder(request, "m", prompt, max_tokens, generated=generated)
        self.apply(requests={**self.plan.requests, request: order})

    def leave_out(self, request: str) -> None:
        self.apply(requests={name: order for name, order in self.plan.requests.items() if name != request})

    def ends(self, request: str) -> list[EngineEvent]:
        return [event for event in self.seen if isinstance(event, ENDS) and event.request == request]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.mlx)])
def loop(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Loop]:
    folder = tiny_model()
    weights_bytes = read_model_folder(folder).weights_bytes
    if request.param == "fake":
        engine: Engine = FakeEngine(
            "thread", step_s=0.005, slice_bytes=weights_bytes // 4
        )  # steps as long as the real ones
    else:
        from omlxd.engine.thread import EngineThread

        engine = EngineThread()
    played = Loop(engine, folder, weights_bytes)
    yield played
    assert engine.close(DEADLINE_S)
    numbers = [event.seq for event in played.seen]
    assert numbers == sorted(set(numbers)), "events are numbered upwards and come in order"


def test_a_load_reports_its_start_its_progress_and_its_end_once(loop: Loop) -> None:
    done = loop.load()
    kinds = [type(event) for event in loop.seen]
    assert kinds[0] is EngineStarted
    assert kinds.count(LoadDone) == 1
    assert set(kinds[1:-1]) == {LoadProgress}
    progress = [event.done_bytes for event in loop.seen if isinstance(event, LoadProgress)]
    assert progress == sorted(progress)
    assert abs(done.info.weights_bytes - loop.weights_bytes) <= 64
    assert loop.rest().active_bytes >= loop.weights_bytes


def test_a_request_is_prefilled_generates_and_finishes_and_nothing_follows(loop: Loop) -> None:
    loop.load()
    loop.start("r", prompt=LONG[:40], max_tokens=4)
    end = loop.until(Finished)
    loop.fence()
    mine = [event for event in loop.seen if getattr(event, "request", None) == "r"]
    prefilled = [event.done for event in mine if isinstance(event, Prefilled)]
    assert prefilled == sorted(prefilled)
    assert sum(event.tokens for event in mine if isinstance(event, Generated)) <= 4
    assert mine[-1] is end
    assert end.reason in FinishReason


def test_a_request_that_ended_is_not_started_again_while_the_plan_names_it(loop: Loop) -> None:
    loop.load()
    loop.start("r")
    loop.until(Finished)
    loop.start("other")
    loop.until(Finished, request="other")
    loop.apply()
    loop.fence()
    assert len(loop.ends("r")) == 1


def test_a_request_left_out_of_the_plan_ends_once_and_its_memory_is_back(loop: Loop) -> None:
    loop.load()
    idle_bytes = loop.rest().active_bytes
    loop.start("r", prompt=LONG)
    loop.until(Prefilled)
    loop.leave_out("r")
    loop.until(RequestGone)
    loop.apply()
    loop.apply()
    loop.fence()
    assert [type(event) for event in loop.ends("r")] == [RequestGone]
    assert loop.engine.kv_bytes()["m"] == 0
    assert loop.rest().active_bytes <= idle_bytes + 64 * 1024


def test_one_of_two_requests_left_out_does_not_disturb_the_other(loop: Loop) -> None:
    loop.load()
    loop.start("r", prompt=LONG)
    loop.start("other", prompt=LONG)
    loop.until(Prefilled)
    loop.leave_out("r")
    loop.until(Finished, request="other")
    assert [type(event) for event in loop.ends("r")] == [RequestGone]


def test_what_was_wanted_for_a_moment_only_leaves_nothing_behind_after_a_fence(loop: Loop) -> None:
    loop.load()
    for n in range(20):
        loop.start(f"r{n}", prompt=LONG)
        loop.leave_out(f"r{n}")
    loop.fence()
    counts = {len(loop.ends(f"r{n}")) for n in range(20)}
    assert counts <= {0, 1}
    assert loop.fence() == []
    assert loop.engine.kv_bytes()["m"] == 0


def test_a_request_may_come_again_under_another_name(loop: Loop) -> None:
    loop.load()
    loop.start("r", prompt=LONG)
    loop.until(Prefilled)
    loop.leave_out("r")
    loop.start("r.2")
    assert loop.until(Finished).request == "r.2"


def test_a_request_that_brings_what_it_had_generated_goes_on_behind_it(loop: Loop) -> None:
    loop.load()
    loop.start("whole", max_tokens=8)
    loop.until(Finished)
    loop.start("r", max_tokens=8)
    loop.until(Generated, request="r")
    loop.leave_out("r")
    loop.until(RequestGone, Finished, request="r")
    told = [event for event in loop.seen if isinstance(event, Generated) and event.request == "r"]
    tokens = tuple(token for event in told for token in event.token_ids)
    assert 1 <= len(tokens) <= 8
    if len(tokens) < 8:
        loop.start("r.2", max_tokens=8, generated=tokens)
        loop.until(Finished, request="r.2")
    told = [event for event in loop.seen if isinstance(event, Generated)]
    whole = [event for event in told if event.request == "whole"]
    parts = [event for event in told if event.request != "whole"]
    assert [event.token_ids for event in whole] == [event.token_ids for event in parts]
    assert "".join(event.text for event in whole) == "".join(event.text for event in parts)
    totals = {event.request: event.total for event in loop.seen if isinstance(event, Prefilled)}
    assert totals.get("r.2", 3 + len(tokens)) == 3 + len(tokens)


def test_a_loaded_model_stays_until_a_plan_that_has_seen_it_leaves_it_out(loop: Loop) -> None:
    loop.apply(load=loop.order())
    done = loop.until(LoadDone)
    loop.apply(load=None, resident=frozenset(), seen_seq=done.seq - 1)
    loop.fence()
    assert loop.rest().active_bytes >= loop.weights_bytes
    loop.apply(resident=frozenset(), seen_seq=done.seq)
    loop.until(Unloaded)


def test_unloading_gives_the_memory_back_and_ends_the_requests(loop: Loop) -> None:
    loop.load()
    loop.start("r", prompt=LONG)
    loop.until(Prefilled)
    loop.apply(resident=frozenset(), requests={})
    gone = loop.until(Unloaded)
    assert [type(event) for event in loop.ends("r")] == [RequestGone]
    assert gone.reading.active_bytes < loop.weights_bytes // 2
    assert gone.reading.at_rest
    assert "m" not in loop.engine.kv_bytes()


def test_a_model_can_be_loaded_again_after_it_was_unloaded(loop: Loop) -> None:
    for name in ("first", "second"):
        loop.load()
        loop.start(name)
        assert loop.until(Finished).request == name
        loop.apply(resident=frozenset(), requests={})
        loop.until(Unloaded)


def test_a_cancelled_load_leaves_memory_as_it_was(loop: Loop) -> None:
    before_bytes = loop.rest().active_bytes
    loop.apply(load=loop.order())
    loop.until(LoadProgress)
    loop.apply(load=None)
    end = loop.until(LoadEnded, LoadDone)
    if isinstance(end, LoadDone):  # it was too late: the next plan leaves it out
        loop.apply()
        loop.until(Unloaded)
    else:
        assert isinstance(end.error, LoadCancelled)
    loop.fence()
    assert len([event for event in loop.seen if isinstance(event, LoadEnded | LoadDone)]) == 1
    assert loop.rest().active_bytes < before_bytes + loop.weights_bytes // 2
    loop.load()


def test_a_load_that_cannot_succeed_ends_once_with_a_reason_and_no_memory(loop: Loop, tmp_path: Path) -> None:
    if isinstance(loop.engine, FakeEngine):
        loop.engine.load_errors["broken"] = ValueError("missing parameters")
    loop.apply(load=loop.order("broken", tmp_path))
    end = loop.until(LoadEnded)
    assert isinstance(end.error, OmlxError)
    assert end.error.__traceback__ is None
    loop.apply()
    loop.fence()
    assert len([event for event in loop.seen if isinstance(event, LoadEnded)]) == 1
    assert loop.rest().active_bytes < loop.weights_bytes // 2


def test_naming_a_model_that_is_not_loaded_loads_nothing(loop: Loop) -> None:
    loop.apply(resident=frozenset({"m"}))
    assert loop.fence() == []
    assert loop.rest().active_bytes < loop.weights_bytes // 2


def test_over_its_limit_the_engine_stands_still_until_a_plan_has_seen_it(loop: Loop) -> None:
    loop.load()
    loop.apply(limits=EngineLimits(soft_bytes=1, pause_above_bytes=1))
    loop.start("r", prompt=LONG)
    over = loop.until(OverLimit)
    assert over.reading.at_rest
    assert loop.fence() == []
    loop.apply(seen_seq=over.seq - 1)
    assert loop.fence() == []
    loop.apply(limits=EngineLimits())
    loop.until(Finished)


def test_it_obeys_plans_while_it_stands_still(loop: Loop) -> None:
    loop.load()
    loop.apply(limits=EngineLimits(soft_bytes=1, pause_above_bytes=1))
    loop.start("r", prompt=LONG)
    over = loop.until(OverLimit)
    loop.apply(requests={}, seen_seq=over.seq - 1)
    loop.until(RequestGone)
    loop.apply(resident=frozenset(), seen_seq=over.seq - 1)
    loop.until(Unloaded)


def test_a_model_stands_still_at_the_end_of_its_grant_asks_once_and_goes_on_with_more(loop: Loop) -> None:
    loop.load()
    loop.apply(granted_tokens={"m": 44})
    loop.start("r", prompt=LONG[:40], max_tokens=6)
    asked = loop.until(NeedsBlock)
    assert (asked.model, asked.length_tokens) == ("m", 44)
    loop.fence()
    assert not loop.ends("r")
    assert sum(isinstance(event, NeedsBlock) for event in loop.seen) == 1
    loop.apply(granted_tokens={"m": 300})
    loop.until(Finished, request="r")


def test_a_prompt_that_begins_like_an_ended_request_goes_on_from_there(loop: Loop) -> None:
    loop.apply(prefix_cache_bytes=64 * MIB)
    loop.load()
    loop.start("r", prompt=LONG, max_tokens=4)
    loop.until(Finished, request="r")
    assert loop.engine.prefix_bytes()["m"] > 0
    loop.start("other", prompt=(*LONG[:400], 77, 78), max_tokens=4)
    loop.until(Finished, request="other")
    told = [event for event in loop.seen if isinstance(event, Prefilled) and event.request == "other"]
    assert {event.reused for event in told} == {400}
    assert told[0].done > 400
    assert told[-1].done == told[-1].total == 402


def test_a_request_may_leave_the_prefix_cache_alone(loop: Loop) -> None:
    loop.apply(prefix_cache_bytes=64 * MIB)
    loop.load()
    loop.start("keeps", prompt=LONG, max_tokens=4)
    loop.until(Finished, request="keeps")
    kept_bytes = loop.engine.prefix_bytes()["m"]
    apart = GenerationOrder("apart", "m", (*LONG, 77, 78), 4, cache_prompt=False)
    loop.apply(requests={**loop.plan.requests, "apart": apart})
    loop.until(Finished, request="apart")
    told = [event for event in loop.seen if isinstance(event, Prefilled) and event.request == "apart"]
    assert {event.reused for event in told} == {0}
    loop.fence()
    assert loop.engine.prefix_bytes()["m"] == kept_bytes


def test_a_prompt_tells_its_peak_above_what_was_there_and_its_end_what_the_caches_took(loop: Loop) -> None:
    loop.load()
    idle_bytes = loop.rest().active_bytes
    if isinstance(loop.engine, FakeEngine):
        loop.engine.measures_prefill = True
    loop.start("r", prompt=LONG, max_tokens=4)
    end = loop.until(Finished, request="r")
    steps = [event for event in loop.seen if isinstance(event, Prefilled)]
    assert abs(steps[0].live_bytes - idle_bytes) <= 64 * 1024
    assert all(step.peak_bytes >= step.live_bytes for step in steps)
    assert end.model_kv_bytes >= steps[-1].kv_bytes > 0


def test_what_is_kept_for_later_prompts_is_given_back_before_anything_else_of_a_plan_begins(loop: Loop) -> None:
    loop.load()
    idle_bytes = loop.rest().active_bytes
    loop.apply(prefix_cache_bytes=64 * MIB)
    loop.start("r", prompt=LONG, max_tokens=4)
    loop.until(Finished, request="r")
    kept_bytes = loop.engine.prefix_bytes()["m"]
    assert loop.rest().active_bytes >= idle_bytes + kept_bytes
    loop.apply(prefix_cache_bytes=kept_bytes - 1)
    assert loop.rest().active_bytes <= idle_bytes + 64 * 1024
    assert not loop.engine.prefix_bytes().get("m")
    loop.start("other", prompt=LONG, max_tokens=4)
    loop.until(Finished, request="other")
    assert not loop.engine.prefix_bytes().get("m"), "what is larger than the budget is not kept"


def test_a_request_that_is_taken_out_leaves_nothing_for_others(loop: Loop) -> None:
    loop.apply(prefix_cache_bytes=64 * MIB)
    loop.load()
    loop.start("r", prompt=LONG)
    loop.until(Prefilled)
    loop.leave_out("r")
    loop.until(RequestGone)
    assert not loop.engine.prefix_bytes().get("m")


def test_what_a_model_has_kept_goes_with_it(loop: Loop) -> None:
    before_bytes = loop.rest().active_bytes
    loop.apply(prefix_cache_bytes=64 * MIB)
    loop.load()
    loop.start("r", prompt=LONG, max_tokens=4)
    loop.until(Finished)
    loop.apply(resident=frozenset(), requests={})
    gone = loop.until(Unloaded)
    assert "m" not in loop.engine.prefix_bytes()
    assert gone.reading.active_bytes <= before_bytes + 64 * 1024


def test_a_reading_at_rest_comes_while_it_is_busy(loop: Loop) -> None:
    loop.load()
    loop.start("r", prompt=LONG)
    loop.until(Prefilled)
    reading = loop.rest()
    assert reading.at_rest
    assert reading.active_bytes >= loop.weights_bytes


def test_the_tokenizer_is_there_after_the_first_load_and_stays_after_the_unload(loop: Loop) -> None:
    assert loop.engine.codec("m") is None
    loop.load()
    codec = loop.engine.codec("m")
    assert codec is not None
    tokens = codec.encode_text("hello world")
    assert tokens
    assert all(0 <= token < codec.vocab_size for token in tokens)
    loop.apply(resident=frozenset())
    loop.until(Unloaded)
    assert loop.engine.codec("m") is not None


def test_the_tokenizer_is_there_before_the_weights(loop: Loop) -> None:
    loop.apply(load=loop.order())
    loop.until(LoadProgress)
    assert loop.engine.codec("m") is not None


def test_closing_ends_all_that_runs_with_one_error_and_may_be_repeated(loop: Loop) -> None:
    loop.load()
    loop.start("r", prompt=LONG)
    loop.until(Prefilled)
    assert loop.engine.close(DEADLINE_S)
    assert loop.engine.close(DEADLINE_S)
    loop.fence()
    assert [type(event) for event in loop.ends("r")] == [RequestFailed]
    assert loop.rest().active_bytes < loop.weights_bytes // 2


def test_an_engine_that_never_loaded_anything_closes(loop: Loop) -> None:
    assert loop.rest().active_bytes < loop.weights_bytes // 2
    assert loop.engine.close(DEADLINE_S)
    assert loop.engine.stalled_s() == 0.0


def test_the_stop_sequence_that_ended_a_request_is_told(loop: Loop) -> None:
    loop.load()
    loop.start("free", max_tokens=6)
    assert loop.until(Finished, request="free").stop is None
    text = "".join(event.text for event in loop.seen if isinstance(event, Generated) and event.request == "free")
    word = text[3:5]
    order = GenerationOrder("stopped", "m", (5, 6, 7), 6, stop=("\x01", word))
    loop.apply(requests={"stopped": order})
    ended = loop.until(Finished, request="stopped")
    assert (ended.reason, ended.stop) == (FinishReason.STOP, word)
    said = "".join(event.text for event in loop.seen if isinstance(event, Generated) and event.request == "stopped")
    assert said == text[: text.find(word)]


def test_each_token_comes_with_its_log_probability_when_that_was_asked_for(loop: Loop) -> None:
    loop.load()
    orders = [GenerationOrder(f"r{top}", "m", (5, 6, 7), 4, top_logprobs=top) for top in (None, 0, 2)]
    loop.apply(requests={order.request: order for order in orders})
    for _ in orders:
        loop.until(Finished)
    for order in orders:
        events = [each for each in loop.seen if isinstance(each, Generated) and each.request == order.request]
        told = [logprob for event in events for logprob in event.logprobs]
        if order.top_logprobs is None:
            assert told == []
        else:
            assert [each.token for each in told] == [token for event in events for token in event.token_ids]
            assert {len(each.top) for each in told} == {order.top_logprobs}


def test_steps_are_timed(loop: Loop) -> None:
    loop.load()
    loop.start("r")
    loop.until(Finished)
    assert sum(loop.engine.step_times().counts) >= 4
