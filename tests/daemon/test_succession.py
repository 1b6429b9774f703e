"""Models under another manifest: the removed ones serve what they have and go, the changed ones are loaded again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from omlxd.core.errors import LoadCancelled, UnknownModel
from omlxd.core.events import EventName
from omlxd.core.manifest import ModelSettings
from omlxd.daemon.refusals import aborted
from omlxd.daemon.request import Generation
from omlxd.daemon.succession import Succession
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, until, until_decoding

PATIENCE_S = 20.0


class Changing(Scene):
    """A pool whose manifest changes."""

    def __init__(self, sizes: dict[str, float], **options: Any) -> None:
        super().__init__(sizes, **options)
        self.succession = Succession(self.pool, lambda: PATIENCE_S)

    def manifest(self, **models: str) -> None:
        """Another manifest is in force: folders by model."""
        made = {name: ModelSettings(name=name, path=f"/models/{folder}") for name, folder in models.items()}
        self.pool.roster.replace(made)
        self.succession.begin()

    async def answering(self, max_tokens: int) -> Generation:
        """An answer of `chat` that has begun."""
        generation = self.pool.generate("chat", prompt="hi", max_tokens=max_tokens)
        await until_decoding(generation)
        return generation

    async def settled(self) -> None:
        async with asyncio.timeout(1000):
            await self.succession.settled()

    @property
    def folders_loaded(self) -> list[str]:
        return [str(event.fields["path"]) for event in self.named(EventName.LOAD_STARTED)]


@asynccontextmanager
async def changing(*names: str, **options: Any) -> AsyncIterator[Changing]:
    scene = Changing(dict.fromkeys(names, 10), **options)
    async with scene.pool:
        yield scene
        await scene.succession.stop()


@on_virtual_time
async def test_a_removed_model_finishes_its_stream_however_long_and_goes() -> None:
    async with changing("chat", "other", answer_tokens=10_000, step_s=0.1) as scene:
        await scene.pool.load("other")
        generation = await scene.answering(max_tokens=4000)
        scene.manifest(other="other")
        with pytest.raises(UnknownModel):
            scene.pool.generate("chat", prompt="hi")
        await generation.wait_ended(1000)
        await scene.settled()
        assert generation.error is None
        assert generation.generated_tokens == 4000
        assert scene.states == {"other": "loaded"}
        assert scene.engine.loaded == {"other"}
        (decision,) = scene.named(EventName.DECISION)
        assert (decision.model, decision.fields["trigger"]) == ("chat", "reload")


@on_virtual_time
async def test_a_request_that_waits_for_the_load_of_a_removed_model_is_served() -> None:
    async with changing("chat", slice_bytes=2**20, step_s=0.5, answer_tokens=5) as scene:
        generation = scene.pool.generate("chat", prompt="hi")
        await until(lambda: scene.states["chat"] == "loading")
        scene.manifest()
        await generation.wait_ended(1000)
        await scene.settled()
        assert generation.error is None
        assert (scene.states, scene.engine.loaded) == ({}, set())


@on_virtual_time
async def test_the_load_of_a_removed_model_that_no_request_wants_is_stopped() -> None:
    async with changing("chat", slice_bytes=2**20, step_s=0.5) as scene:
        load = asyncio.ensure_future(scene.pool.load("chat"))
        await until(lambda: scene.states["chat"] == "loading")
        scene.manifest()
        with pytest.raises(LoadCancelled, match="removed from the manifest"):
            await load
        await scene.settled()
        assert (scene.states, scene.engine.active_bytes) == ({}, 0)


@on_virtual_time
async def test_a_model_that_comes_back_before_it_is_gone_has_lost_nothing() -> None:
    async with changing("chat", answer_tokens=5000, step_s=0.01) as scene:
        generation = await scene.answering(max_tokens=3000)
        scene.manifest()
        await asyncio.sleep(1.0)
        scene.manifest(chat="chat")
        await scene.settled()
        again = scene.pool.generate("chat", prompt="hi", max_tokens=5)
        for each in (generation, again):
            await each.wait_ended(1000)
            assert each.error is None
        assert len(scene.folders_loaded) == 1
        assert scene.states == {"chat": "loaded"}


@on_virtual_time
async def test_a_changed_model_that_is_idle_is_loaded_again_at_once() -> None:
    async with changing("chat", "new") as scene:
        await scene.pool.load("chat")
        scene.manifest(chat="new")
        await scene.settled()
        assert scene.folders_loaded == ["/models/chat", "/models/new"]
        assert scene.states == {"chat": "loaded"}


@on_virtual_time
async def test_a_changed_model_that_is_not_loaded_is_only_loaded_when_it_is_wanted() -> None:
    async with changing("chat", "new") as scene:
        await scene.pool.load("chat")
        await scene.pool.unload("chat")
        assert scene.engine.codec("chat") is not None
        scene.manifest(chat="new")
        await scene.settled()
        assert scene.engine.codec("chat") is None, "prompts are not judged by the old tokenizer"
        assert scene.states == {"chat": "unloaded"}
        await scene.pool.load("chat")
        assert scene.folders_loaded[-1] == "/models/new"


@on_virtual_time
async def test_a_changed_model_finishes_its_answers_and_keeps_nobody_waiting_meanwhile() -> None:
    async with changing("chat", "new", answer_tokens=10_000, step_s=0.01) as scene:
        first = await scene.answering(max_tokens=500)
        scene.manifest(chat="new")
        second = scene.pool.generate("chat", prompt="hi", max_tokens=5)
        await second.wait_ended(1000)
        assert not first.ended, "the second had not to wait for the end of the first"
        await scene.settled()
        assert (first.error, first.generated_tokens) == (None, 500)
        assert scene.folders_loaded == ["/models/chat", "/models/new"]


@on_virtual_time
async def test_a_changed_model_that_is_never_idle_serves_what_it_has_and_then_takes_the_new_weights() -> None:
    async with changing("chat", "new", answer_tokens=10**6, step_s=0.01) as scene:
        old = await scene.answering(max_tokens=4000)
        scene.manifest(chat="new")
        await asyncio.sleep(PATIENCE_S + 1)
        late = scene.pool.generate("chat", prompt="hi", max_tokens=5)
        await asyncio.sleep(1)
        assert late.generated_tokens == 0
        await late.wait_ended(1000)
        await scene.settled()
        assert (old.error, old.generated_tokens, late.error) == (None, 4000, None)
        assert scene.folders_loaded == ["/models/chat", "/models/new"]


@on_virtual_time
async def test_a_request_that_waited_for_the_new_weights_is_read_by_the_new_tokenizer() -> None:
    async with changing("chat", "new", answer_tokens=10**6, step_s=0.01) as scene:
        await scene.answering(max_tokens=4000)
        scene.manifest(chat="new")
        await asyncio.sleep(PATIENCE_S + 1)
        before = scene.engine.codec("chat")
        late = scene.pool.generate("chat", prompt="hi there", max_tokens=5)
        await until(lambda: bool(late.prompt))
        first_reading = late.prompt
        await late.wait_ended(1000)
        assert late.error is None
        assert scene.engine.codec("chat") is not before
        assert late.prompt is not first_reading


@on_virtual_time
async def test_a_changed_model_whose_new_files_cannot_be_loaded_keeps_its_old_weights() -> None:
    async with changing("chat") as scene:
        await scene.pool.load("chat")
        scene.manifest(chat="nowhere")
        scene.folders.sizes.pop("chat")
        await scene.settled()
        assert scene.states == {"chat": "loaded"}
        (kept,) = scene.named(EventName.MODEL_KEPT)
        assert "does not exist" in kept.fields["error"]["message"]
        generation = scene.pool.generate("chat", prompt="hi", max_tokens=3)
        await generation.wait_ended(100)
        assert generation.error is None
        scene.folders.sizes["nowhere"] = 10
        await scene.pool.unload("chat")
        await scene.pool.load("chat")
        assert scene.folders_loaded[-1] == "/models/nowhere", "with the next load at the latest"


@on_virtual_time
async def test_an_answer_that_was_parked_goes_on_with_the_weights_it_began_with() -> None:
    async with changing("chat", "new", answer_tokens=10**6, step_s=0.01) as scene:
        generation = await scene.answering(max_tokens=1000)
        scene.manifest(chat="new")
        async with scene.pool.lock:
            await scene.pool.levers.evict("chat", aborted("chat", "its memory is needed"))
        await generation.wait_ended(1000)
        await scene.settled()
        assert (generation.error, generation.generated_tokens, generation.parks) == (None, 1000, 1)
        assert scene.folders_loaded == ["/models/chat", "/models/chat", "/models/new"]


@on_virtual_time
async def test_a_change_that_is_taken_back_changes_nothing() -> None:
    async with changing("chat", "new", answer_tokens=10**6, step_s=0.01) as scene:
        generation = await scene.answering(max_tokens=1000)
        scene.manifest(chat="new")
        await asyncio.sleep(1)
        scene.manifest(chat="chat")
        await scene.settled()
        await generation.wait_ended(1000)
        assert generation.error is None
        assert scene.folders_loaded == ["/models/chat"]


@on_virtual_time
async def test_of_many_manifests_in_a_row_the_last_one_holds() -> None:
    folders = [f"f{number}" for number in range(10)]
    async with changing("chat", *folders, slice_bytes=2**20, step_s=0.05) as scene:
        await scene.pool.load("chat")
        for number, folder in enumerate(folders):
            scene.manifest(**({"chat": folder} if number % 3 else {}))
            await asyncio.sleep(0.07)
        scene.manifest(chat="f9")
        await scene.settled()
        await scene.pool.load("chat")
        assert scene.pool.resolve("chat").settings.path == "/models/f9"
        assert scene.folders_loaded[-1] == "/models/f9"
        assert scene.states == {"chat": "loaded"}


@on_virtual_time
async def test_other_settings_of_a_loaded_model_hold_at_once() -> None:
    async with changing("chat") as scene:
        entry = await scene.pool.load("chat")
        scene.pool.roster.replace({"chat": replace(entry.settings, ttl_s=5.0, aliases=("default",))})
        scene.succession.begin()
        assert scene.succession.pending == ()
        assert scene.pool.resolve("default") is entry
        assert entry.settings.ttl_s == 5.0
