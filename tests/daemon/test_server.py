"""The two doors: who gets in, what is refused, and that no client can hold the server up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
from pathlib import Path
from random import Random

import pytest

from omlxd.core.errors import AlreadyRunning, StartFailed
from omlxd.core.events import EventName
from omlxd.core.manifest import ListenAddress
from omlxd.daemon import sockets
from omlxd.daemon.home import Home, find_home
from omlxd.daemon.lock import HomeLock
from omlxd.daemon.server import OWN_FILES, connections_within
from omlxd.daemon.sockets import bind_tcp, bind_unix, peer_uid, prepare_home, remove_socket
from tests.daemon.doors import PROMPT, both_doors, doors, knock, raw
from tests.fakes.wire import connect, fetch


async def test_one_server_answers_on_both_sockets(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        assert (await fetch(made.unix, "GET", "/v1/models")).status == 200
        assert (await fetch(made.tcp, "GET", "/v1/models")).status == 200


async def test_control_routes_do_not_exist_on_tcp(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        assert (await fetch(made.unix, "GET", "/v1/control/status")).status == 200
        answer = await fetch(made.tcp, "GET", "/v1/control/status")
        assert answer.status == 404
        assert answer.json["error"]["code"] == "no_such_path"


async def test_unknown_paths_and_methods_are_answered_in_the_shape_of_their_api(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        unknown = await fetch(made.unix, "GET", "/v1/control/nothing")
        assert (unknown.status, set(unknown.json["error"])) == (404, {"code", "message", "hint", "details"})
        unknown = await fetch(made.unix, "GET", "/v1/embeddings")
        assert (unknown.status, set(unknown.json["error"])) == (404, {"message", "type", "param", "code", "hint"})
        method = await fetch(made.unix, "DELETE", "/v1/control/status")
        assert (method.status, method.json["error"]["code"]) == (405, "method_not_allowed")
        assert "GET" in method.headers["allow"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "in `/v1`"),
        ("/v1/v1/messages", "leave `/v1` out"),
        ("/v1/responses", "`/v1/chat/completions`"),
        ("/api/chat", "`/v1/chat/completions`"),
        ("/v1/embeddings", ""),
    ],
)
async def test_a_client_with_a_wrong_address_is_told_the_right_one(tmp_path: Path, path: str, hint: str) -> None:
    async with doors(tmp_path) as made:
        answer = await fetch(made.tcp, "POST", path, {})
        assert answer.status == 404
        assert hint in (answer.json["error"]["hint"] or "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1234", "[::1]:80"])
async def test_our_own_names_are_answered_on_tcp(tmp_path: Path, host: str) -> None:
    async with doors(tmp_path) as made:
        assert (await fetch(made.tcp, "GET", "/v1/models", headers={"Host": host})).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "[::1", "10.0.0.1"])
async def test_a_foreign_name_that_was_rebound_to_us_is_refused(tmp_path: Path, host: str) -> None:
    async with doors(tmp_path) as made:
        answer = await fetch(made.tcp, "GET", "/v1/models", headers={"Host": host})
        assert (answer.status, answer.json["error"]["code"]) == (403, "not_permitted")


async def test_an_empty_name_is_asked_for(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        answer = await fetch(made.tcp, "GET", "/v1/models", headers={"Host": ""})
        assert (answer.status, answer.json["error"]["message"]) == (400, "the request has no `Host`")


async def test_a_daemon_that_listens_everywhere_is_reached_by_address_and_not_by_foreign_names(tmp_path: Path) -> None:
    async with doors(tmp_path, listen="0.0.0.0") as made:
        for host, status in {"10.0.0.1:8321": 200, socket.gethostname(): 200, "evil.example": 403}.items():
            assert (await fetch(made.tcp, "GET", "/v1/models", headers={"Host": host})).status == status
        refused = await fetch(made.tcp, "GET", "/v1/models", headers={"Host": "evil.example"})
        assert f"`{socket.gethostname().lower()}`" in refused.json["error"]["hint"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:3000", 200), ("http://127.0.0.1", 200), ("https://evil.example", 403), ("null", 403)],
)
async def test_web_pages_of_other_hosts_may_not_post_to_us(tmp_path: Path, origin: str, status: int) -> None:
    async with doors(tmp_path) as made:
        assert (await fetch(made.tcp, "POST", "/v1/models", {}, {"Origin": origin})).status == status


async def test_the_key_is_asked_for_on_tcp_only(tmp_path: Path) -> None:
    async with doors(tmp_path, api_key="sésame") as made:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}):
            answer = await fetch(made.tcp, "GET", "/v1/models", headers=headers)
            assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
            assert "sésame" not in answer.body.decode()
        good = await raw(
            made.tcp,
            "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            "Authorization: bearer sésame\r\n\r\n".encode(),
        )
        assert good.startswith(b"HTTP/1.1 200")
        assert (await fetch(made.unix, "GET", "/v1/models")).status == 200
        assert (await fetch(made.tcp, "GET", "/health")).status == 200


@both_doors
async def test_a_body_that_is_too_long_is_refused_announced_or_not(tmp_path: Path, door: str) -> None:
    async with doors(tmp_path) as made:
        assert (await fetch(made.door(door), "POST", "/v1/models", b"x" * 1_000)).json == {"bytes": 1_000}
        announced = await fetch(made.door(door), "POST", "/v1/models", b"x" * 1_001)
        assert (announced.status, announced.json["error"]["code"]) == (413, "body_too_large")
        chunked = await raw(
            made.door(door),
            b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"400\r\n"
            + b"x" * 1024
            + b"\r\n",
        )
        assert chunked.startswith(b"HTTP/1.1 413")
        assert made.events == []


@both_doors
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (b"Content-Encoding: gzip\r\nContent-Length: 2", 415, "unsupported_encoding"),
        (b"Content-Encoding: identity\r\nContent-Length: 2", 200, None),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 2", 400, "invalid_request"),
    ],
)
async def test_a_body_whose_end_or_meaning_is_in_doubt_is_refused(
    tmp_path: Path, door: str, headers: bytes, status: int, code: str | None
) -> None:
    async with doors(tmp_path) as made:
        head = b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + headers + b"\r\n\r\n"
        answer, _, body = (await raw(made.door(door), head + b"{}")).partition(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert json.loads(body).get("error", {}).get("code") == code


@both_doors
async def test_a_client_that_still_sends_is_heard_out_so_that_it_reads_why_it_was_refused(
    tmp_path: Path, door: str
) -> None:
    """The body is far larger than what the sockets hold: were the connection closed at once, `sendall` would fail."""
    body = b"x" * 30_000_000
    head = b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    for framing, sent in (
        (b"Content-Length: %d\r\n\r\n" % len(body), body),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
    ):
        async with doors(tmp_path) as made:
            assert (await raw(made.door(door), head + framing + sent)).startswith(b"HTTP/1.1 413")
            assert made.events == []


@both_doors
async def test_what_is_not_http_gets_a_json_400_and_the_connection_is_closed(tmp_path: Path, door: str) -> None:
    async with doors(tmp_path) as made:
        answer = await raw(made.door(door), b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "invalid_request"


@both_doors
async def test_a_client_that_goes_away_in_its_body_is_a_line_without_frames(tmp_path: Path, door: str) -> None:
    async with doors(tmp_path) as made:
        peer = await asyncio.to_thread(knock, made.door(door))
        peer.sendall(b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{}")
        assert (await fetch(made.door(door), "GET", "/health")).status == 200
        peer.close()
    (event,) = made.events
    assert event.fields == {"method": "POST", "path": "/v1/models", "message": "the client went away"}


async def test_a_web_socket_is_refused_plainly_and_nothing_is_advised(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        answer = await fetch(made.tcp, "GET", "/v1/models", headers=headers)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
        assert "WebSocket" in answer.json["error"]["message"]
    assert made.events == []


def scrambled(random: Random) -> bytes:
    """A good request with up to three pieces of it cut out, doubled or overwritten."""
    sent = (
        b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 8\r\n\r\n" + b'{"a": 1}'
    )
    for _ in range(random.randint(1, 3)):
        start = random.randrange(len(sent))
        end = min(len(sent), start + random.randint(1, 12))
        piece = random.choice((b"", sent[start:end] * 2, random.randbytes(end - start)))
        sent = sent[:start] + piece + sent[end:]
    return sent


@both_doors
async def test_scrambled_requests_are_answered_or_cut_off_and_nothing_stumbles(tmp_path: Path, door: str) -> None:
    async def answer(number: int) -> bytes:
        try:
            return await raw(made.door(door), scrambled(Random(number)))
        except OSError:
            return b""

    async with doors(tmp_path, read_timeout_s=0.05) as made:
        answers = await asyncio.gather(*map(answer, range(200)))
        statuses = {int(each.split(b" ", 2)[1]) for each in answers if each}
        assert {200, 400, 408} <= statuses <= {200, 400, 403, 404, 405, 408, 413}
        assert (await fetch(made.door(door), "GET", "/health")).status == 200
    assert [event for event in made.events if "traceback" in event.fields] == []


async def test_a_client_that_waits_for_its_answer_is_not_cut_off(tmp_path: Path) -> None:
    async with doors(tmp_path, read_timeout_s=0.05) as made:
        waiting = await asyncio.to_thread(connect, made.unix)
        waiting.sendall(b"POST /v1/control/wait HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert (await fetch(made.unix, "GET", "/health")).status == 200
        for _ in range(2):  # connections that were opened later have been cut off by then
            with contextlib.suppress(ConnectionResetError):
                assert await raw(made.unix, b"") == b""
        assert not made.closed.is_set()
        waiting.close()
        async with asyncio.timeout(20):
            await made.closed.wait()


@pytest.mark.parametrize(
    ("files", "connections"),
    [(256, 96), (1024, 480), (2048, 512), (2**20, 512), (resource.RLIM_INFINITY, 512), (32, 1)],
)
def test_a_crowd_at_both_doors_leaves_the_daemon_descriptors_of_its_own(files: int, connections: int) -> None:
    assert connections_within(files) == connections
    assert files < 100 or files == resource.RLIM_INFINITY or 2 * connections + OWN_FILES <= files


async def test_a_client_that_reads_slowly_gets_the_end_of_its_answer(tmp_path: Path) -> None:
    async with doors(tmp_path, read_timeout_s=0.05) as made:
        reading = await asyncio.to_thread(connect, made.unix)
        with reading:
            reading.sendall(b"GET /v1/control/long HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await asyncio.to_thread(reading.recv, 12) == b"HTTP/1.1 200"
            for _ in range(2):  # connections that were opened later have been cut off by then
                with contextlib.suppress(ConnectionResetError):
                    assert await raw(made.unix, b"") == b""
            rest = await asyncio.to_thread(_read, reading, 4_000_001)
        assert len(rest) > 4_000_000  # with its header


async def test_a_bug_is_a_500_without_traceback_and_a_log_line_with_frames_but_no_text(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        answer = await fetch(made.unix, "GET", "/v1/control/broken")
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
        assert PROMPT not in answer.body.decode()
        assert [event.event for event in made.events] == [EventName.API_ERROR]
        assert "_broken" in made.events[0].fields["traceback"]
        assert PROMPT not in str(made.events[0])


async def test_busy_says_when_to_come_back(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        answer = await fetch(made.unix, "GET", "/v1/control/busy")
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")


async def test_a_stream_ends_its_source_when_the_client_goes_away(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        peer = await asyncio.to_thread(_start_reading, made.unix)
        peer.close()
        async with asyncio.timeout(20):
            await made.closed.wait()


async def test_a_reader_that_stands_still_holds_up_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        peer = await asyncio.to_thread(_start_reading, made.unix)  # and reads no further
        assert (await fetch(made.unix, "GET", "/health")).status == 200
        assert not made.closed.is_set()
    peer.close()
    assert made.closed.is_set()
    assert made.events == []


async def test_a_reader_that_stands_still_for_too_long_is_cut_off(tmp_path: Path) -> None:
    async with doors(tmp_path, write_timeout_s=0.05) as made:
        peer = await asyncio.to_thread(_start_reading, made.unix)  # and reads no further
        async with asyncio.timeout(20):
            await made.closed.wait()
        peer.close()


async def test_work_for_a_whole_answer_is_cancelled_when_the_client_goes_away(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        peer = await asyncio.to_thread(connect, made.unix)
        peer.sendall(b"POST /v1/control/wait HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert (await fetch(made.unix, "GET", "/health")).status == 200
        peer.close()
        async with asyncio.timeout(20):
            await made.closed.wait()


async def test_another_users_process_is_cut_off_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with doors(tmp_path) as made:
        monkeypatch.setattr(sockets, "peer_uid", lambda connection: os.geteuid() + 4711)
        with pytest.raises((ConnectionError, OSError)):
            await fetch(made.unix, "GET", "/health")
        assert (await fetch(made.tcp, "GET", "/health")).status == 200


def _read(peer: socket.socket, least_bytes: int) -> bytes:
    received = b""
    while len(received) < least_bytes and (part := peer.recv(65_536)):
        received += part
    return received


def _start_reading(path: Path) -> socket.socket:
    peer = connect(path)
    peer.sendall(b"GET /v1/control/endless HTTP/1.1\r\nHost: x\r\n\r\n")
    assert peer.recv(100).startswith(b"HTTP/1.1 200")
    return peer


def test_the_peers_user_is_known() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        assert peer_uid(left) == os.geteuid()


def test_the_socket_is_private_from_the_start(tmp_path: Path) -> None:
    before = os.umask(0o002)
    with bind_unix(tmp_path / "s"):
        assert os.umask(before) == 0o002
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_stale_socket_gives_way_and_the_end_leaves_none(tmp_path: Path) -> None:
    bind_unix(tmp_path / "s").close()
    bind_unix(tmp_path / "s").close()
    remove_socket(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    remove_socket(tmp_path / "s")


@pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), Path.mkdir, lambda path: path.symlink_to("x")])
def test_what_is_not_a_socket_is_never_removed(tmp_path: Path, make: object) -> None:
    path = tmp_path / "s"
    make(path)  # type: ignore[operator]
    with pytest.raises(StartFailed, match="not a socket") as refused:
        bind_unix(path)
    assert refused.value.hint
    remove_socket(path)
    assert path.is_symlink() or path.exists()


def test_a_socket_path_that_is_too_long_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="takes 103") as refused:
        bind_unix(tmp_path / ("é" * 52))
    assert "OMLXD_HOME" in str(refused.value.hint)


def test_a_port_that_is_taken_names_the_key_to_change(tmp_path: Path) -> None:
    first = bind_tcp(ListenAddress("127.0.0.1", 0), manifest=tmp_path)
    with first, pytest.raises(StartFailed, match="taken") as refused:
        bind_tcp(ListenAddress("127.0.0.1", first.getsockname()[1]), manifest=tmp_path / "omlxd.toml")
    assert "api.listen" in str(refused.value.hint)
    assert "omlxd.toml" in str(refused.value.hint)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "x" * 300])
def test_an_address_that_is_not_ours_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(StartFailed, match="cannot listen"):
        bind_tcp(ListenAddress(host, 0), manifest=tmp_path)


def test_the_home_is_made_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home")
    prepare_home(home)
    assert home.root.stat().st_mode & 0o777 == 0o700
    assert home.logs.stat().st_mode & 0o777 == 0o700


def test_a_home_that_others_can_enter_is_closed_when_all_in_it_is_ours(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.manifest.write_text("")
    home.root.chmod(0o755)
    prepare_home(home)
    assert home.root.stat().st_mode & 0o777 == 0o700


def test_a_directory_with_other_things_in_it_is_left_as_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    (home.root / "photos").mkdir()
    home.root.chmod(0o755)
    with pytest.raises(StartFailed, match="open to other users") as refused:
        prepare_home(home)
    assert "chmod 700" in str(refused.value.hint)
    assert home.root.stat().st_mode & 0o777 == 0o755


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(StartFailed):
        prepare_home(Home(tmp_path / "home"))


def test_the_home_is_the_option_else_the_variable_else_the_dotted_directory(tmp_path: Path) -> None:
    assert find_home(tmp_path, {"OMLXD_HOME": "/elsewhere"}).root == tmp_path
    assert find_home(None, {"OMLXD_HOME": "/elsewhere"}).root == Path("/elsewhere")
    assert find_home(None, {"OMLXD_HOME": ""}).root == Path.home() / ".omlxd"
    assert find_home("relative", {}).root == Path.cwd() / "relative"


def test_a_home_whose_path_is_no_text_is_refused() -> None:
    with pytest.raises(StartFailed, match=r"not UTF-8: `/h\\udcff`"):
        find_home(None, {"OMLXD_HOME": "/h\udcff"})


def test_of_two_locks_the_second_is_refused_and_says_who_has_it(tmp_path: Path) -> None:
    with HomeLock(tmp_path / "lock"), pytest.raises(AlreadyRunning, match=str(os.getpid())):
        HomeLock(tmp_path / "lock")
    with HomeLock(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").exists()
