"""The machine stays awake while requests are in flight: on virtual time, with a recorded program, and over a daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omlxd.core.errors import OmlxError
from omlxd.core.events import EventName
from omlxd.daemon.caffeinate import CAFFEINATE, Caffeinate
from omlxd.daemon.keep_awake import LINGER_S, KeepAwake, SleepAssertion, sleep_assertion
from tests.fakes.caffeinate import program
from tests.fakes.clock import on_virtual_time
from tests.fakes.daemon import TIMEOUT_S, running
from tests.fakes.engine import FakeEngine
from tests.fakes.pools import Scene

TOLD = (EventName.SLEEP_PREVENTED, EventName.SLEEP_ALLOWED, EventName.SLEEP_NOT_PREVENTED)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for caffeinate waits by a pidfd")


class FakeAssertion:
    """Remembers whether it is held, and refuses when it is told to."""

    def __init__(self, refusals: int = 0) -> None:
        self.held, self.taken, self.refusals = False, 0, refusals

    async def hold(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OmlxError("`caffeinate` cannot be run")
        self.taken += not self.held
        self.held = True

    async def release(self) -> None:
        self.held = False


@asynccontextmanager
async def watched(assertion: SleepAssertion, **options: object) -> AsyncIterator[Scene]:
    scene = Scene({"chat": 100, "other": 100}, **options)
    awake = KeepAwake(scene.pool, assertion, scene.pool.emit)
    async with scene.pool:
        awake.start()
        awake.start()
        yield scene
        await awake.stop()
        await awake.stop()
    assert "omlxd-awake" not in {task.get_name() for task in asyncio.all_tasks()}


@on_virtual_time
async def test_it_is_held_from_a_request_s_arrival_until_a_while_after_its_end() -> None:
    assertion = FakeAssertion()
    async with watched(assertion, drive="manual") as scene:
        await asyncio.sleep(1000)
        assert not assertion.held
        generation = scene.pool.generate("chat", prompt="hi", max_tokens=3)
        await asyncio.sleep(0.001)
        assert assertion.held, "a request that waits for its model counts"
        await asyncio.sleep(1000)
        assert assertion.held, "however long it takes"
        while not generation.ended:
            scene.engine.step()
            await asyncio.sleep(0)
        await asyncio.sleep(LINGER_S - 1)
        assert assertion.held
        await asyncio.sleep(2)
        assert not assertion.held
        assert [event.event for event in scene.named(*TOLD)] == [EventName.SLEEP_PREVENTED, EventName.SLEEP_ALLOWED]


@on_virtual_time
async def test_questions_in_a_row_do_not_make_it_flap() -> None:
    assertion = FakeAssertion()
    async with watched(assertion) as scene:
        for _ in range(5):
            await scene.pool.generate("chat", prompt="hi", max_tokens=3).text()
            await asyncio.sleep(LINGER_S - 5)
        assert (assertion.held, assertion.taken) == (True, 1)
        await asyncio.sleep(LINGER_S)
        assert not assertion.held


@on_virtual_time
async def test_the_end_of_the_watch_lets_it_go_at_once() -> None:
    assertion = FakeAssertion()
    async with watched(assertion, drive="manual") as scene:
        scene.pool.generate("chat", prompt="hi")
        await asyncio.sleep(1)
        assert assertion.held
    assert not assertion.held


@on_virtual_time
async def test_when_it_cannot_be_held_that_is_told_once_and_tried_again_with_the_next_request() -> None:
    assertion = FakeAssertion(refusals=2)
    async with watched(assertion) as scene:
        for held in (False, False, True):
            await scene.pool.generate("chat", prompt="hi", max_tokens=50).text()
            assert assertion.held is held
            await asyncio.sleep(1)
        (told, prevented) = scene.named(*TOLD)
        assert (told.event, told.fields) == (EventName.SLEEP_NOT_PREVENTED, {"error": "`caffeinate` cannot be run"})
        assert prevented.event is EventName.SLEEP_PREVENTED


def test_only_a_mac_is_kept_awake() -> None:
    assert isinstance(sleep_assertion("darwin"), Caffeinate)
    assert sleep_assertion("linux") is None
    assert str(CAFFEINATE) == "/usr/bin/caffeinate"


# The program


async def recorded(folder: Path, until: Callable[[list[str]], bool]) -> list[str]:
    """The stand-in's record, once it is as wanted."""
    record = folder / "caffeinate.log"

    def look() -> list[str]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not until(lines := record.read_text().splitlines() if record.exists() else []):
            assert time.monotonic() < deadline_s, lines
        return lines

    return await asyncio.to_thread(look)


@linux
async def test_caffeinate_is_run_for_this_process_once_and_ended(tmp_path: Path) -> None:
    assertion = Caffeinate(program(tmp_path))
    await assertion.release()
    await assertion.hold()
    await assertion.hold()
    assert await recorded(tmp_path, bool) == [f"held -i -w {os.getpid()}"]
    await assertion.release()
    assert await recorded(tmp_path, lambda lines: len(lines) > 1) == [f"held -i -w {os.getpid()}", "ended"]
    await assertion.release()


@linux
async def test_one_that_somebody_killed_is_taken_anew(tmp_path: Path) -> None:
    assertion = Caffeinate(program(tmp_path))
    await assertion.hold()
    await recorded(tmp_path, bool)
    process = assertion._process
    assert process is not None
    process.kill()
    await process.wait()
    await assertion.hold()
    assert len(await recorded(tmp_path, lambda lines: len(lines) > 1)) == 2
    await assertion.release()


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be run"), ("#!/bin/sh\nexit 64\n", "status 64")])
async def test_a_program_that_does_not_work_is_an_error_that_says_so(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "caffeinate"
    if text is not None:
        path.write_text(text)
        path.chmod(0o755)
    assertion = Caffeinate(path)
    said = []
    for _ in range(2):
        try:
            await assertion.hold()
        except OmlxError as error:
            said.append(error.message)
        if assertion._process is not None:
            await assertion._process.wait()
    assert [message in each for each in said] == [True] * (2 if text is None else 1)
    await assertion.release()


@linux
async def test_a_daemon_holds_it_over_a_request_and_not_beyond_its_own_end(tmp_path: Path) -> None:
    engine = FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002)
    async with running(tmp_path, {"chat": {"mib": 10}}, engine=engine, assertion=Caffeinate(program(tmp_path))) as one:
        assert not (tmp_path / "caffeinate.log").exists()
        body = {"model": "chat", "prompt": "hi", "max_tokens": 10**6}
        request = asyncio.create_task(one.ask("POST", "/v1/completions", body))
        assert await recorded(tmp_path, bool) == [f"held -i -w {os.getpid()}"]
        one.stop.ask(now=True)
        assert (await request).status == 503
        await one.ended()
        assert (await recorded(tmp_path, lambda lines: len(lines) > 1))[-1] == "ended"


@linux
async def test_the_manifest_can_turn_it_off(tmp_path: Path) -> None:
    settings = {"keep_awake": False}
    async with running(
        tmp_path, {"chat": {"mib": 10}}, daemon=settings, assertion=Caffeinate(program(tmp_path))
    ) as one:
        answer = await one.ask("POST", "/v1/completions", {"model": "chat", "prompt": "hi", "max_tokens": 20})
        assert answer.status == 200
    assert not (tmp_path / "caffeinate.log").exists()


@linux
async def test_after_kill_9_nothing_is_held(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from omlxd.daemon.caffeinate import Caffeinate\n"
        "async def main():\n"
        f"    held = Caffeinate(Path({str(program(tmp_path))!r})); await held.hold(); await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await recorded(tmp_path, bool) == [f"held -i -w {process.pid}"]
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert (await recorded(tmp_path, lambda lines: len(lines) > 1))[-1] == "ended"
