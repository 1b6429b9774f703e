"""What does not depend on how many models there are and how many requests wait."""

from __future__ import annotations

from omlxd.core.states import RequestState
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, turns, until, until_decoding


@on_virtual_time
async def test_one_more_token_wakes_nobody_who_waits_for_a_change() -> None:
    scene = Scene({"chat": 100}, drive="manual", answer_tokens=None)
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi", max_tokens=20)
        while generation.state is not RequestState.DECODE:
            scene.engine.step()
            await pool.change.wait()
        change, tokens = pool.change, generation.generated_tokens
        for _ in range(5):
            scene.engine.step()
            await turns()
        assert generation.generated_tokens == tokens + 5
        assert pool.change is change
        scene.engine.run_until_idle()
        await generation.text()
        assert pool.change is not change


@on_virtual_time
async def test_a_decision_looks_only_at_models_that_hold_memory() -> None:
    scene = Scene({"chat": 100, "other": 100, **{f"spare-{number}": 100 for number in range(50)}})
    async with scene.pool as pool:
        assert pool.snapshot(scene.engine.read()).entries == ()
        await pool.load("chat")
        await until_decoding(pool.generate("other", prompt="hi"))
        assert [each.name for each in pool.snapshot(scene.engine.read()).entries] == ["chat", "other"]


@on_virtual_time
async def test_who_waits_for_a_tokenizer_looks_for_it_only_when_the_load_tells() -> None:
    scene = Scene({"chat": 100, "other": 100}, drive="manual", slice_bytes=100 * MIB)
    asked = list[str]()
    codec = scene.engine.codec
    scene.engine.codec = lambda model: asked.append(model) or codec(model)  # type: ignore[method-assign, func-returns-value]
    async with scene.pool as pool:
        waiting = [pool.generate("chat", prompt="hi") for _ in range(10)]
        await until(lambda: pool.loads.in_progress == "chat")
        asked.clear()
        pool.notify()
        await turns()
        assert asked == []
        scene.engine.run_until_idle()
        await until(lambda: pool.entries["chat"].loaded)
        assert {each.prompt_tokens for each in waiting} == {1}
