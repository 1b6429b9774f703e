"""A daemon's life: start, ready, one per home, drain, end; as a function, and as a real process over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import AlreadyRunning, InvalidRequest, ManifestInvalid
from omlxd.core.events import EventName
from omlxd.daemon.home import Home
from omlxd.daemon.lock import HomeLock
from omlxd.daemon.state_file import StateFile
from omlxd.engine.orders import MIB
from tests.fakes.daemon import RunningDaemon, manifest, model_folder, running
from tests.fakes.engine import FakeEngine
from tests.fakes.wire import Answer, ask

TWO = {"chat": {"mib": 40}, "small": {"mib": 30}}
PATH = "/v1/chat/completions"
TALK = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10**6}
TIMEOUT_S = 60.0
HEAVY = ("mlx", "mlx_lm", "transformers", "numpy", "torch")


def endless(**options: Any) -> FakeEngine:
    """Answers that go on until somebody stops them."""
    return FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002, **options)


async def talking(daemon: RunningDaemon, **changes: Any) -> asyncio.Task[Answer]:
    """A request that goes on for ever, once it decodes."""
    task = asyncio.create_task(daemon.ask("POST", PATH, {**TALK, **changes}))
    async with asyncio.timeout(20):
        while [view["state"] for view in (await daemon.control("GET", "requests"))["requests"]] != ["decode"]:
            pass
    return task


# As a function


async def test_pins_come_first_and_then_preloads_and_what_does_not_fit_stays_unloaded_with_its_reason(
    tmp_path: Path,
) -> None:
    models = {"pre": {"mib": 50, "preload": True}, "free": {}, "pin": {"mib": 60, "pin": True}}
    async with running(tmp_path, models) as daemon:
        assert await daemon.states() == {"pre": "unloaded", "free": "unloaded", "pin": "loaded"}
        views = (await daemon.control("GET", "models"))["models"]
        assert "pinned" in views[0]["error"]
        names = [line["event"] for line in daemon.log()]
        assert names.index("load_finished") < names.index("load_failed") < names.index("daemon_ready")


async def test_a_preload_that_does_not_fit_beside_the_ones_before_it_stays_unloaded_until_somebody_asks(
    tmp_path: Path,
) -> None:
    models = {name: {"mib": 40, "preload": True} for name in ("first", "second", "third")}
    async with running(tmp_path, models) as daemon:
        assert await daemon.states() == {"first": "loaded", "second": "loaded", "third": "unloaded"}
        views = (await daemon.control("GET", "models"))["models"]
        assert "`third` was not preloaded" in views[2]["error"]
        assert "beside `first`, `second`" in views[2]["error"]
        await daemon.control("POST", "models/third/load", {})
        assert await daemon.states() == {"first": "unloaded", "second": "loaded", "third": "loaded"}


async def test_while_pins_are_loading_it_answers_and_says_starting(tmp_path: Path) -> None:
    engine = FakeEngine("thread", slice_bytes=MIB, step_s=0.02)
    async with running(tmp_path, {"pin": {"mib": 40, "pin": True}}, engine=engine, wait_ready=False) as daemon:
        assert (await daemon.control("GET", "status"))["state"] == "starting"
        health = await daemon.ask("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "starting")
        await daemon.until("ready")
        assert (await daemon.ask("GET", "/health")).json["status"] == "ok"


async def test_a_stop_lets_a_running_request_finish(tmp_path: Path) -> None:
    engine = FakeEngine("thread", answer_tokens=200, step_s=0.002)
    async with running(tmp_path, TWO, engine=engine) as daemon:
        request = await talking(daemon)
        daemon.stop.ask()
        assert (await request).json["usage"]["completion_tokens"] == 200
        assert (await daemon.ended()).cut_short is False


@pytest.mark.parametrize(("restart", "told"), [(False, "is shutting down"), (True, "is being restarted")])
async def test_who_asks_for_the_end_once_more_joins_the_drain(tmp_path: Path, restart: bool, told: str) -> None:
    engine = FakeEngine("thread", answer_tokens=200, step_s=0.002)
    async with running(tmp_path, TWO, engine=engine) as daemon:
        request = await talking(daemon)
        for _ in range(3):
            await daemon.control("POST", "stop", {"restart": restart})
        refused = await daemon.ask("POST", PATH, TALK)
        assert told in refused.json["error"]["message"]
        assert (await request).json["usage"]["completion_tokens"] == 200
        assert (await daemon.ended()).cut_short is False


async def test_while_it_drains_nothing_new_is_taken_and_status_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon:
        request = await talking(daemon)
        await daemon.control("POST", "stop")
        await daemon.until("draining")
        for method, path, body in (("POST", PATH, TALK), ("POST", "/v1/control/models/small/load", {})):
            refused = await daemon.ask(method, path, body)
            assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
            assert int(refused.headers["retry-after"]) >= 1
        assert (await daemon.ask("GET", "/health")).json["status"] == "draining"
        daemon.stop.signalled("SIGTERM")  # behind what asked before it: do not wait
        assert (await request).status == 503
        assert (await daemon.ended()).cut_short is True
        assert (daemon.log()[-1]["cut"], daemon.log()[-1]["level"]) == ({"chat": 1}, "warning")


@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_drain_timeout_the_rest_ends_with_one_error_and_the_daemon_with_success(
    tmp_path: Path, stream: bool
) -> None:
    async with running(tmp_path, TWO, engine=endless(), daemon={"drain_timeout": "0s"}) as daemon:
        request = await talking(daemon, stream=stream)
        daemon.stop.ask()
        body = (await request).body.decode()
        assert body.count("request_aborted") == 1
        assert "shutting down" in body
        ended = await daemon.ended()
        assert (ended.cut_short, ended.engine_gone) == (False, True)
        assert daemon.log()[-1]["cut"] == {"chat": 1}
        assert daemon.engine.loaded == set()


async def test_a_load_in_progress_does_not_hold_up_the_end_and_whoever_waits_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=FakeEngine("thread", slice_bytes=MIB, step_s=0.02)) as daemon:
        load = asyncio.create_task(daemon.ask("POST", "/v1/control/models/chat/load", {}))
        async with asyncio.timeout(20):
            while (await daemon.states())["chat"] != "loading":
                pass
        daemon.stop.ask()
        assert (await load).json["error"]["code"] in ("shutting_down", "load_cancelled")
        assert (await daemon.ended()).engine_gone


async def test_the_end_leaves_no_socket_and_no_lock_and_the_next_one_starts(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        daemon.stop.ask()
        await daemon.ended()
        assert not daemon.home.socket.exists()
        assert daemon.log()[-1]["event"] == "daemon_stopped"
        assert (daemon.log()[-1]["cut"], daemon.log()[-1]["level"]) == ({}, "info")
    async with running(tmp_path, TWO) as daemon:
        assert (await daemon.ask("GET", "/health")).status == 200


async def test_a_second_daemon_of_the_same_home_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        with pytest.raises(AlreadyRunning, match=str(os.getpid())):
            async with running(tmp_path, TWO):
                pass
        assert (await daemon.ask("GET", "/health")).status == 200


async def test_a_pin_of_the_manifest_that_can_never_be_kept_is_the_manifests_mistake(tmp_path: Path) -> None:
    models = {"a": {"mib": 101, "pin": True}, "b": {"mib": 150, "pin": True}, "gone": {"pin": True}}
    text = manifest(tmp_path, models)
    (tmp_path / "gone" / "model.safetensors").unlink()
    with pytest.raises(ManifestInvalid) as refused:
        async with running(tmp_path, text):
            pass
    assert [problem.split(":")[0] for problem in refused.value.problems] == ["models.a.pin", "models.b.pin"]
    assert not (tmp_path / "home" / "omlxd.sock").exists()


async def test_a_pin_set_at_run_time_that_the_limit_no_longer_holds_is_a_warning(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/pin", {})
    async with running(tmp_path, TWO, max_memory="35M") as daemon:
        assert [line["event"] for line in daemon.log() if line["level"] == "warning"].count("limit_warning") == 1
        assert (await daemon.states())["chat"] == "unloaded"


async def test_a_hard_limit_that_contradicts_the_soft_one_is_the_manifests_mistake_or_the_flags(tmp_path: Path) -> None:
    with pytest.raises(ManifestInvalid) as refused:
        async with running(tmp_path, TWO, daemon={"max_memory": "100M", "hard_limit": "50M"}):
            pass
    assert refused.value.problems[0].startswith("daemon.hard_limit: ")
    with pytest.raises(InvalidRequest):
        async with running(tmp_path, TWO, max_memory="300M"):
            pass


async def test_a_damaged_state_file_is_moved_aside_and_told(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir(mode=0o700)
    home.state.write_text("schema = [")
    async with running(tmp_path, TWO) as daemon:
        assert EventName.STATE_FILE_DAMAGED in [line["event"] for line in daemon.log()]
        assert home.state.with_name("state.toml.damaged").exists()
        assert any("state.toml` is damaged" in warning for warning in daemon.ready.warnings)


async def test_measured_sizes_are_remembered_for_the_same_files_only(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
    learned = StateFile(tmp_path / "home" / "state.toml", lambda _: None).load().learned
    assert learned["chat"].weights_bytes == 40 * MIB
    model_folder(tmp_path / "chat", 50 * MIB)
    async with running(tmp_path, TWO | {"chat": {"mib": 50}}) as daemon:
        loaded = await daemon.control("POST", "models/chat/load")
        assert loaded["model"]["weights_bytes"] == 50 * MIB


# As a process


@dataclass
class Process:
    """A daemon's process with its ready line."""

    popen: subprocess.Popen[bytes]
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def socket(self) -> Path:
        return Path(self.ready["socket"])

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def wait(self) -> int:
        return self.popen.wait(TIMEOUT_S)


def spawn(home: Path, *options: str, wait: bool = True) -> Process:
    """`python -m omlxd.daemon`, as `omlxd start` runs it."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "omlxd.daemon", "--home", str(home), "--ready-fd", str(writer), *options]
    with (home.parent / "daemon.err").open("ab") as err:
        popen = subprocess.Popen(command, pass_fds=[writer], stderr=err, stdout=err, start_new_session=True)
    os.close(writer)
    made = Process(popen)
    if wait:
        made.ready = json.loads(read_line(reader) or "{}")
        os.close(reader)
    else:
        made.ready = {"fd": reader}
    return made


def read_line(fd: int) -> bytes:
    """All that is written to `fd` until its end."""
    found = b""
    while select.select([fd], [], [], TIMEOUT_S)[0] and (part := os.read(fd, 65_536)):
        found += part
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a manifest of one model that has no folder."""
    return make_home(tmp_path / "h")


def make_home(root: Path, text: str | None = None) -> Path:
    root.mkdir(mode=0o700)
    (root / "omlxd.toml").write_text(
        text or f'[daemon]\nmax_memory = "100M"\n[api]\nlisten = "off"\n[models.a]\npath = "{root}/a"\n'
    )
    return root


@pytest.fixture
def spawned() -> Iterator[list[Process]]:
    """Processes that are ended when the test is over."""
    made: list[Process] = []
    yield made
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            process.popen.kill()
        process.popen.wait(TIMEOUT_S)


def test_sigusr1_writes_down_every_thread_s_stack_and_the_daemon_goes_on(home: Path, spawned: list[Process]) -> None:
    spawned.append(process := spawn(home))
    stacks = home / "logs" / "stacks.txt"
    assert stacks.stat().st_mode & 0o777 == 0o600
    process.popen.send_signal(signal.SIGUSR1)
    text = ""
    while not ("__main__.py" in text and text.count("hread 0x") >= 2):  # the event loop's and the engine's
        assert ask(process.socket, "GET", "/v1/control/status").status == 200
        text = stacks.read_text()
    for _ in range(50):  # in the midst of whatever it does
        for _ in range(50):
            process.popen.send_signal(signal.SIGUSR1)
        assert ask(process.socket, "GET", "/v1/control/status").status == 200
    process.popen.terminate()
    assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_success_and_leaves_nothing(
    home: Path, spawned: list[Process], number: signal.Signals
) -> None:
    spawned.append(process := spawn(home))
    assert process.ready == {
        "ready": True,
        "pid": process.popen.pid,
        "socket": str(home / "omlxd.sock"),
        "api": None,
        "warnings": ["`a` cannot be loaded: its folder is not there; `omlxd check` shows what is wrong"],
        "loading": [],
    }
    assert ask(process.socket, "GET", "/v1/control/status").json["pid"] == process.popen.pid
    process.popen.send_signal(number)
    assert process.wait() == 0
    assert not process.socket.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_daemon_is_small_and_has_imported_no_model_library(home: Path, spawned: list[Process]) -> None:
    spawned.append(process := spawn(home))
    assert ask(process.socket, "GET", "/v1/control/status").status == 200
    assert process.rss_mib() <= 60
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert not [name for name in HEAVY if f"/site-packages/{name}/" in maps]


@pytest.mark.slow
def test_of_eight_starts_at_once_one_wins_and_the_others_say_who(home: Path, spawned: list[Process]) -> None:
    spawned += [spawn(home, wait=False) for _ in range(8)]
    told = [json.loads(read_line(process.ready["fd"])) for process in spawned]
    for process in spawned:
        os.close(process.ready["fd"])
    assert sum("ready" in line for line in told) == 1
    losers = [line["error"] for line in told if "error" in line]
    assert {error["code"] for error in losers} == {"already_running"}
    assert len(losers) == 7
    winner = next(process for process, line in zip(spawned, told, strict=True) if "ready" in line)
    assert {process.wait() for process in spawned if process is not winner} == {1}
    assert ask(home / "omlxd.sock", "GET", "/v1/control/status").json["pid"] == winner.popen.pid


def test_after_kill_9_the_next_start_works(home: Path, spawned: list[Process]) -> None:
    spawned.append(first := spawn(home))
    first.popen.kill()
    first.wait()
    assert first.socket.exists()
    spawned.append(second := spawn(home))
    assert ask(second.socket, "GET", "/v1/control/status").json["pid"] == second.popen.pid


def test_two_homes_are_two_daemons(tmp_path: Path, spawned: list[Process]) -> None:
    spawned += [spawn(make_home(tmp_path / name)) for name in ("one", "two")]
    pids = {ask(process.socket, "GET", "/v1/control/status").json["pid"] for process in spawned}
    assert pids == {process.popen.pid for process in spawned}


def test_a_socket_path_that_is_too_long_says_what_to_do(tmp_path: Path, spawned: list[Process]) -> None:
    spawned.append(process := spawn(make_home(tmp_path / ("x" * 100))))
    assert process.ready["error"]["code"] == "start_failed"
    assert "OMLXD_HOME" in process.ready["error"]["hint"]
    assert process.wait() == 1


def test_a_file_in_the_sockets_place_is_left_alone(home: Path, spawned: list[Process]) -> None:
    (home / "omlxd.sock").write_text("mine")
    spawned.append(process := spawn(home))
    assert process.ready["error"]["code"] == "start_failed"
    assert process.wait() == 1
    assert (home / "omlxd.sock").read_text() == "mine"


def test_a_port_that_is_taken_names_the_key_and_leaves_no_socket(tmp_path: Path, spawned: list[Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = f'[api]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
        home = make_home(tmp_path / "h", text)
        spawned.append(process := spawn(home))
    assert "taken" in process.ready["error"]["message"]
    assert "api.listen" in process.ready["error"]["hint"]
    assert process.wait() == 1
    assert not (home / "omlxd.sock").exists()


def test_a_bad_manifest_is_told_with_all_its_problems_and_exit_status_78(
    tmp_path: Path, spawned: list[Process]
) -> None:
    home = make_home(tmp_path / "h", '[daemon]\nmax_memorie = "1G"\npoll_interval = "x"\n[models.a]\npin = 3\n')
    spawned.append(process := spawn(home))
    assert process.ready["error"]["code"] == "manifest_invalid"
    assert len(process.ready["error"]["details"]["problems"]) >= 3
    assert process.wait() == 78
    told = (tmp_path / "daemon.err").read_text()
    assert told.startswith("error: ")
    assert "max_memorie" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--max-memory", "lots"], 2),
        (["--max-memory", "0.5"], 2),
        (["--hard-limit", "1M"], 2),
        (["--hard-limit", "12"], 2),
        (["--policy", "no"], 2),
    ],
)
def test_a_bad_option_is_exit_status_2(home: Path, spawned: list[Process], options: list[str], status: int) -> None:
    spawned.append(process := spawn(home, *options))
    assert process.wait() == status


def test_models_without_a_folder_are_warned_of_in_one_line_and_the_start_goes_on(
    tmp_path: Path, spawned: list[Process]
) -> None:
    whole = model_folder(tmp_path / "whole", 1000)
    text = '[api]\nlisten = "off"\n' + f'[models.whole]\npath = "{whole}"\n'
    text += '[models.gone]\npath = "/nowhere/gone"\n[models.cached]\nrepo = "org/never-fetched"\n'
    spawned.append(process := spawn(make_home(tmp_path / "h", text)))
    (warning,) = [each for each in process.ready["warnings"] if "folder" in each]
    assert (
        warning == "`gone`, `cached` cannot be loaded: their folders are not there; `omlxd check` shows what is wrong"
    )


def test_a_missing_manifest_is_exit_status_78(tmp_path: Path, spawned: list[Process]) -> None:
    (tmp_path / "h").mkdir(mode=0o700)
    spawned.append(process := spawn(tmp_path / "h"))
    assert process.wait() == 78
    assert "omlxd init" in process.ready["error"]["hint"]


def test_a_starter_that_went_away_does_not_stop_the_start(home: Path, spawned: list[Process]) -> None:
    process = spawn(home, wait=False)
    spawned.append(process)
    os.close(process.ready["fd"])
    with (home / "omlxd.toml").open():
        pass
    for _ in iter(lambda: (home / "omlxd.sock").exists(), True):
        assert process.popen.poll() is None
    process.popen.terminate()
    assert process.wait() == 0


def test_in_the_foreground_events_are_shown_too(home: Path, tmp_path: Path, spawned: list[Process]) -> None:
    spawned.append(process := spawn(home, "--foreground"))
    process.popen.terminate()
    assert process.wait() == 0
    assert "daemon_stopped" in (tmp_path / "daemon.err").read_text()


@pytest.mark.mlx
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_with_a_real_model_in_flight_a_stop_ends_with_success_and_file_limits_stay(
    tmp_path: Path, tiny_model: Any, spawned: list[Process]
) -> None:
    folder = tiny_model("llama", 1_000_000)
    text = (
        f'[daemon]\nmax_memory = "1G"\ndrain_timeout = "0s"\n[api]\nlisten = "off"\n[models.chat]\npath = "{folder}"\n'
    )
    spawned.append(process := spawn(make_home(tmp_path / "h", text)))
    before = open_files_limit(process)
    with contextlib.closing(start_stream(process)) as answer:
        assert b"200 OK" in answer.recv(65_536)
        assert open_files_limit(process) == before
        process.popen.terminate()
        received = b""
        while part := answer.recv(65_536):
            received += part
    assert process.wait() == 0
    assert received.count(b"request_aborted") == 1


def open_files_limit(process: Process) -> str:
    limits = Path(f"/proc/{process.popen.pid}/limits").read_text().splitlines()
    return next(line for line in limits if line.startswith("Max open files"))


def start_stream(process: Process) -> socket.socket:
    body = json.dumps({**TALK, "max_tokens": 2_000, "stream": True}).encode()
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(TIMEOUT_S)
    peer.connect(str(process.socket))
    peer.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return peer


STUCK = """
import asyncio, os, sys, threading
from omlxd.cli.holder import is_held
from omlxd.daemon import __main__, home, lifecycle

serve = lifecycle.serve

async def with_a_stuck_worker(config, **named):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    ended = await serve(config, **named)
    print("held" if is_held(config.home.lock) else "free")
    return ended

lifecycle.serve = with_a_stuck_worker
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_the_home_is_held_to_the_end_of_the_process_and_a_stuck_thread_does_not_put_that_off(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir(mode=0o700)
    home.manifest.write_text('[api]\nlisten = "off"\n')
    reader, writer = os.pipe()
    command = [sys.executable, "-c", STUCK, "--home", str(home.root), "--ready-fd", str(writer)]
    with subprocess.Popen(command, pass_fds=[writer], stdout=subprocess.PIPE, text=True) as process:
        os.close(writer)
        try:
            assert json.loads(read_line(reader))["ready"]
            process.terminate()
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            os.close(reader)
            process.kill()
    assert (process.returncode, output) == (0, "held\n")
    HomeLock(home.lock).release()
