"""Models that do not fit together take turns: nobody starves, nothing is aborted, and few swaps are made."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.core.errors import LoadCancelled
from omlxd.core.events import Event, EventName
from omlxd.core.memory import Policy
from omlxd.daemon.request import Generation
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time, run
from tests.fakes.costs import FakeCosts
from tests.fakes.pools import Scene, until, until_decoding

RELOAD_S = 0.25  # what the fake engine says that a load takes
TURN_S = max(8 * RELOAD_S, 10.0 / 3)  # two models: a third of the bound


async def client(scene: Scene, model: str, asks: int, think_s: float = 0.0) -> list[float]:
    """One that asks again as soon as it has its answer; how long each first token took."""
    waits = []
    for _ in range(asks):
        generation = scene.pool.generate(model, prompt="hi")
        assert (await generation.text()).split() == [f"tok{number}" for number in range(8)]
        waits.append(generation.first_token_s or 0.0)
        await asyncio.sleep(think_s)
    return waits


@on_virtual_time
async def test_a_model_that_is_never_idle_gives_way_within_the_bound_and_loses_no_request() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=0.05)
    async with scene.pool as pool:
        scene.enforcer(1000, hard_mib=1000).start()
        await pool.load("a")
        keeping = [asyncio.create_task(client(scene, "a", 40, think_s=0.01 * number)) for number in range(3)]
        await asyncio.sleep(1.0)
        generation = pool.generate("b", prompt="hi")
        await generation.text()
        assert (generation.first_token_s or 0.0) <= TURN_S + 2.0
        await asyncio.gather(*keeping)
    ended = scene.named(EventName.TURN_ENDED)[0]
    assert ended.model == "a"
    assert ended.fields["for_model"] == "b"
    assert TURN_S <= ended.fields["waited_s"] <= TURN_S + 0.1
    assert not scene.named(EventName.REQUEST_ABORTED, EventName.REQUEST_FAILED)


@on_virtual_time
async def test_a_load_is_not_busy_however_long_the_others_request_takes_and_that_one_is_not_cut_short() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=1.0, answer_tokens=None, load_wait_s=5.0)
    async with scene.pool as pool:
        scene.enforcer(1000, policy=Policy.REFERENCE).start()
        long = pool.generate("a", prompt="hi", max_tokens=300)
        await until_decoding(long)
        waiting = pool.generate("b", prompt="hi", max_tokens=4)
        await asyncio.sleep(50.0)
        late = pool.generate("a", prompt="hi", max_tokens=4)
        assert (await waiting.text()).split() == ["tok0", "tok1", "tok2", "tok3"]
        assert long.generated_tokens == 300
        assert late.generated_tokens == 0
        assert (await late.text()).split() == ["tok0", "tok1", "tok2", "tok3"]


@on_virtual_time
async def test_gracefully_a_request_that_takes_very_long_is_parked_for_the_others_turn_and_then_goes_on() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=1.0, answer_tokens=None, fair_wait_s=4.0)
    async with scene.pool as pool:
        scene.enforcer(1000, policy=Policy.GRACEFUL).start()
        long = pool.generate("a", prompt="hi", max_tokens=100)
        await until_decoding(long)
        waiting = pool.generate("b", prompt="hi", max_tokens=4)
        await waiting.text()
        assert 0 < long.generated_tokens < 30
        assert (waiting.first_token_s or 0.0) <= 2 * 4.0 + 15.0  # a load takes ten steps
        assert (await long.text()).split() == [f"tok{number}" for number in range(100)]
    (parked,) = scene.named(EventName.REQUEST_PARKED)
    (decision, *_) = scene.named(EventName.DECISION)
    assert (parked.decision, parked.model) == (decision.decision, "a")
    assert [each["why"] for each in decision.fields["candidates"]] == ["its turn is over"]


@on_virtual_time
async def test_two_clients_that_alternate_are_served_in_turns_and_not_one_swap_a_request() -> None:
    swaps = {}
    for fair_wait_s in (10.0, None):
        scene = Scene({"a": 600, "b": 600}, step_s=0.01, fair_wait_s=fair_wait_s)
        async with scene.pool as pool:
            scene.enforcer(1000, hard_mib=1000).start()
            waits = await asyncio.gather(client(scene, "a", 50, think_s=0.02), client(scene, "b", 50, think_s=0.02))
            swaps[fair_wait_s] = len(scene.named(EventName.LOAD_FINISHED))
            assert max(*waits[0], *waits[1]) <= TURN_S + 1.0
            assert not pool.generations
    assert swaps[None] >= 90
    assert swaps[10.0] <= 15


@on_virtual_time
async def test_one_client_that_alternates_between_models_waits_for_no_linger() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=0.01)
    async with scene.pool:
        scene.enforcer(1000).start()
        await client(scene, "a", 1)
        for model in ("b", "a", "b"):
            (wait_s,) = await client(scene, model, 1)
            assert wait_s < RELOAD_S


@on_virtual_time
async def test_what_had_gathered_for_a_model_is_served_before_it_gives_way_again() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=0.5, max_batch=1)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        await pool.load("a")
        first = pool.generate("a", prompt="hi")
        gathered = [pool.generate("b", prompt="hi") for _ in range(2)]
        back = [pool.generate("a", prompt="hi") for _ in range(2)]
        await asyncio.gather(*(each.text() for each in (first, *gathered, *back)))
    loads = [event.model for event in scene.named(EventName.LOAD_FINISHED)]
    assert len(loads) <= 3
    assert not scene.named(EventName.REQUEST_ABORTED, EventName.REQUEST_FAILED)


@on_virtual_time
async def test_a_model_that_a_user_has_loaded_is_not_gone_in_the_same_instant() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=0.05)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        keeping = asyncio.create_task(client(scene, "a", 30))
        await asyncio.sleep(0.5)
        await pool.load("b")
        loaded_s = scene.clock()
        await until(lambda: not pool.entries["b"].loaded)
        assert scene.clock() - loaded_s >= 4 * RELOAD_S
        await keeping
        begun_s = scene.clock()
        await pool.load("b")  # what a user asks for next does not wait for what he asked for before
        await pool.load("a")
        await pool.load("b")
        assert scene.clock() - begun_s < 3 * 0.6  # three loads, and nothing between them


@on_virtual_time
async def test_a_load_that_nobody_waits_for_any_more_ends_instead_of_turning_others_out() -> None:
    scene = Scene({"a": 600, "b": 600, "c": 300}, step_s=1.0, answer_tokens=None)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        long = pool.generate("a", prompt="hi", max_tokens=500)
        await until_decoding(long)
        loading = asyncio.create_task(pool.load("b"))
        await asyncio.sleep(0.5)
        loading.cancel()
        behind = pool.generate("c", prompt="hi", max_tokens=4)
        await behind.text()
        assert not long.ended
        assert not scene.named(EventName.TURN_ENDED)
        (cancelled,) = scene.named(EventName.LOAD_CANCELLED)
        assert cancelled.model == "b"
        assert "nobody asks for it" in cancelled.fields["reason"]
        assert pool.entries["b"].error is not None


@on_virtual_time
async def test_clients_without_patience_get_a_busy_model_to_give_way_in_the_end() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=0.05)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        await pool.load("a")
        keeping = [asyncio.create_task(client(scene, "a", 60, think_s=0.01 * number)) for number in range(3)]
        await asyncio.sleep(0.5)
        for _ in range(30):
            async with pool.generate("b", prompt="hi") as asked:
                if await asked.wait(0.3):
                    break
        else:
            pytest.fail("it never came")
        await asyncio.gather(*keeping)
    assert [event.model for event in scene.named(EventName.LOAD_FINISHED)] == ["a", "b", "a"]


@on_virtual_time
async def test_a_cancelled_load_opens_the_doors_that_were_closed_for_it() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=0.05, answer_tokens=None)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        long = pool.generate("a", prompt="hi", max_tokens=1000)
        await until_decoding(long)
        loading = asyncio.create_task(pool.load("b"))
        await until(lambda: pool.entries["a"].gives_way)
        late = pool.generate("a", prompt="hi", max_tokens=3)
        await asyncio.sleep(1.0)
        assert late.generated_tokens == 0
        await pool.unload("b")
        with pytest.raises(LoadCancelled):
            await loading
        assert (await late.text()).split() == ["tok0", "tok1", "tok2"]
        assert not long.ended


@on_virtual_time
async def test_three_models_in_rotation_have_turns_of_some_length_and_nobody_waits_for_much_more_than_the_bound() -> (
    None
):
    scene = Scene({"a": 600, "b": 600, "c": 600}, step_s=0.02, fair_wait_s=12.0)
    async with scene.pool:
        scene.enforcer(1000, hard_mib=1000, policy=Policy.GRACEFUL).start()
        clients = [client(scene, model, 40, think_s=0.01 * at) for model in "abc" for at in range(3)]
        waits = await asyncio.gather(*clients)
    assert max(max(each) for each in waits) <= 12.0 + 2.0
    assert len(scene.named(EventName.LOAD_FINISHED)) <= 10  # 12 with turns of eight reloads
    assert scene.named(EventName.TURN_ENDED)
    assert not scene.named(EventName.REQUEST_PARKED)


@on_virtual_time
async def test_a_turn_does_not_end_before_who_had_gathered_for_it_has_a_first_token() -> None:
    scene = Scene({"a": 600, "b": 600, "c": 600}, step_s=0.5, prefill_chunk_tokens=16, fair_wait_s=8.0)
    async with scene.pool as pool:
        scene.enforcer(1000, hard_mib=1000, policy=Policy.GRACEFUL).start()
        await pool.load("a")
        running = pool.generate("a", prompt="hi")
        long = pool.generate("b", tokens=[1] * 16 * 12)  # six seconds of prefill
        other = pool.generate("c", prompt="hi")
        had_token: list[bool] = []

        def note(event: Event) -> None:
            if event.event is EventName.TURN_ENDED and event.model == "b":
                had_token.append(long.first_token_s is not None)

        scene.on_event = note
        await asyncio.gather(*(each.text() for each in (running, long, other)))
        assert had_token == [True]
        assert (long.parks, other.parks) == (0, 0)


asks = st.tuples(st.sampled_from("abc"), st.floats(0, 8), st.integers(1, 12))


@settings(max_examples=25, deadline=None)
@given(st.lists(asks, min_size=1, max_size=25), st.sampled_from([0.0, 1.0, 10.0]))
def test_every_request_is_answered_within_the_bound_whatever_comes(
    schedule: list[tuple[str, float, int]], fair_wait_s: float
) -> None:
    assert played(schedule, fair_wait_s) == played(schedule, fair_wait_s)


def played(schedule: list[tuple[str, float, int]], fair_wait_s: float) -> list[object]:
    """Three models under a limit for one and a half; what was served when, and that it was soon enough."""

    async def ask(scene: Scene, model: str, at_s: float, tokens: int) -> Generation:
        await asyncio.sleep(at_s)
        generation = scene.pool.generate(model, prompt="hi", max_tokens=tokens)
        assert len((await generation.text()).split()) == tokens
        return generation

    async def play() -> list[object]:
        scene = Scene({"a": 600, "b": 600, "c": 500}, step_s=0.1, answer_tokens=None, fair_wait_s=fair_wait_s)
        async with scene.pool:
            scene.enforcer(1000, hard_mib=1000).start()
            served = await asyncio.gather(*(ask(scene, *each) for each in schedule))
        waits = [generation.first_token_s or 0.0 for generation in served]
        run_s, load_s = 1.5, 1.2  # the longest answer, the longest load
        # Its turn has come at the bound; before it each of the others ends what it runs and is loaded, at most once.
        assert max(waits) <= fair_wait_s + 3 * (run_s + load_s)
        assert not scene.named(EventName.REQUEST_ABORTED, EventName.REQUEST_FAILED)
        assert scene.engine.peak <= 1000 * 2**20
        return [waits, Counter(event.event for event in scene.events)]

    return run(play())


@on_virtual_time
async def test_a_model_is_not_loaded_for_a_prompt_that_would_have_to_wait_for_memory_beside_the_others() -> None:
    """Both models fit; the cache of this prompt does not fit beside a running request."""
    costs = FakeCosts(token_bytes=MIB // 4)  # of the running request 128 MiB, of the prompt 320
    scene = Scene({"a": 300, "b": 300}, costs=costs, step_s=0.05, answer_tokens=None)
    async with scene.pool as pool:
        scene.enforcer(1000, hard_mib=2000).start()
        await pool.load("b")
        await pool.unload("b")
        running = pool.generate("a", prompt="hi", max_tokens=200)
        await until_decoding(running)
        long = pool.generate("b", prompt="word " * 900, max_tokens=4)
        short = pool.generate("b", prompt="hi", max_tokens=4)
        await until(lambda: bool(scene.named(EventName.LOAD_WAITING)))
        (waiting,) = scene.named(EventName.LOAD_WAITING)
        assert "`b` with a prompt of 900 tokens needs" in waiting.fields["reason"]
        assert scene.states["b"] == "unloaded"
        await asyncio.gather(long.text(), short.text(), running.text())
        assert [event.model for event in scene.named(EventName.LOAD_STARTED)].count("b") == 2
        assert not [each for each in scene.named(EventName.REQUEST_WAITING) if each.fields.get("short_bytes")]
    assert not scene.named(EventName.REQUEST_ABORTED, EventName.REQUEST_FAILED)


@on_virtual_time
async def test_a_prompt_that_goes_away_is_no_reason_to_wait() -> None:
    scene = Scene({"a": 300, "b": 300}, costs=FakeCosts(token_bytes=MIB // 4), step_s=0.05, answer_tokens=None)
    async with scene.pool as pool:
        scene.enforcer(1000, hard_mib=2000).start()
        await pool.load("b")
        await pool.unload("b")
        running = pool.generate("a", prompt="hi", max_tokens=200)
        await until_decoding(running)
        long = pool.generate("b", prompt="word " * 900, max_tokens=4)
        short = pool.generate("b", prompt="hi", max_tokens=4)
        await until(lambda: bool(scene.named(EventName.LOAD_WAITING)))
        await long.aclose()
        assert (await short.text()).split() == [f"tok{number}" for number in range(4)]
        assert not running.ended
    assert not scene.named(EventName.TURN_ENDED)
