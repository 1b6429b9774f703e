"""What the benches of peers are made of, without a peer: the client, the sampler, the turns, and a server of a few
lines that answers as it is told, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.bench.peers.asking import ask
from tests.bench.peers.catalogue import Launch, Needs, Peer
from tests.bench.peers.contest import OURS, Contest
from tests.bench.peers.footprint import Sampler, resident_bytes, tree
from tests.bench.peers.processes import Running, started
from tests.bench.peers.rows import rows
from tests.bench.peers.venvs import Package, Unavailable, ensure, last_line
from tests.bench.report import Judged, Target, format_row
from tests.bench.table import table

SERVER = """
import json, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] == "missing":
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"no such model")
            return
        self.send_response(200)
        self.end_headers()
        if asked["model"] == "gone":
            return
        for letter in "abcdefgh"[:asked["max_tokens"]]:
            frame = {"choices": [{"delta": {"content": letter}}]}
            self.wfile.write(b"data: " + json.dumps(frame).encode() + b"\\n\\n")
        if asked["model"] == "broken":
            self.wfile.write(b'data: {"error": "out of memory"}\\n\\n')
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_):
        pass

child = subprocess.Popen([sys.executable, "-c", "import time; held = bytearray(b'x' * 40_000_000); time.sleep(600)"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def _peer(source: str) -> Peer:
    return Peer(
        "stand-in", None, lambda launch: [sys.executable, "-c", source, str(launch.port)], lambda launch: {"m": "m"}
    )


@contextmanager
def _up(home: Path, source: str = SERVER) -> Iterator[Running]:
    with started(_peer(source), {"m": home}, Needs(), home, home) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with _up(tmp_path_factory.mktemp("stand-in")) as running:
        yield running


def test_a_whole_answer_has_as_many_tokens_as_were_asked_for(server: Running) -> None:
    reply = ask(server.address, "m", "hi", 4)
    assert (reply.whole, reply.text, reply.status) == (True, "abcd", 200)
    assert reply.sent_s <= reply.first_s <= reply.last_s


@pytest.mark.parametrize(
    ("model", "tokens", "trouble"),
    [
        ("m", 12, "8 of 12 tokens"),
        ("gone", 4, "0 of 4 tokens"),
        ("missing", 4, "404: no such model"),
        ("broken", 4, "error in the stream: out of memory"),
    ],
)
def test_an_answer_that_is_not_whole_says_why(server: Running, model: str, tokens: int, trouble: str) -> None:
    reply = ask(server.address, model, "hi", tokens)
    assert not reply.whole
    assert reply.trouble == trouble


def test_nobody_at_the_address_is_an_answer_too() -> None:
    assert "ConnectionRefusedError" in ask(("127.0.0.1", 1), "m", "hi", 4).trouble


def test_the_footprint_is_of_all_processes_of_a_server(server: Running) -> None:
    child = next(each for each in tree(server.process) if each != server.process)
    while child.memory_info().rss < 40_000_000:
        pass  # it takes its memory by and by
    with Sampler(server.process) as sampler:
        while sampler.samples < 3:
            pass
    alone_bytes = server.process.memory_info().rss
    assert len(tree(server.process)) == 2
    assert resident_bytes(tree(server.process)) >= alone_bytes + 40_000_000
    assert sampler.peak_bytes > alone_bytes + 40_000_000


def test_a_server_takes_all_its_processes_with_it(tmp_path: Path) -> None:
    with _up(tmp_path) as running:
        processes = tree(running.process)
        for each in processes:
            each.suspend()  # as it is between two turns
    assert len(processes) == 2
    assert not any(each.is_running() for each in processes)


def test_a_server_that_ends_at_its_start_leaves_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match="status 1: ModuleNotFoundError: No module named 'no_such_module'"),
        _up(tmp_path, "import no_such_module"),
    ):
        pass


@pytest.fixture
def sleepers() -> Iterator[dict[str, Running]]:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = {name: psutil.Popen(command) for name in (OURS, "one", "two")}
    yield {name: Running(name, ("", 0), {}, psutil.Process(process.pid)) for name, process in processes.items()}
    for process in processes.values():
        process.kill()
        process.wait()


def test_one_runs_and_the_others_stand_still_and_each_begins_a_round(sleepers: dict[str, Running]) -> None:
    for each in sleepers.values():
        each.process.suspend()
    order = []

    def work(server: Running, number: int) -> int:
        assert server.process.status() != psutil.STATUS_STOPPED
        for name in set(sleepers) - {server.name}:
            while sleepers[name].process.status() != psutil.STATUS_STOPPED:
                pass  # it stops as soon as the system gets to it; if it never does, the test's time is up
        order.append((number, server.name))
        return number

    found = Contest(dict(sleepers)).turns(2, work)
    assert [name for _, name in order[::3]] == [OURS, "one", "two"]
    assert found == {name: [1, 2] for name in sleepers}  # round 0 warms up


def test_who_fails_is_out_and_the_others_go_on(sleepers: dict[str, Running]) -> None:
    def work(server: Running, number: int) -> float:
        if (server.name, number) == ("one", 1):
            raise Unavailable("it fell over")
        return 2.0

    contest = Contest(dict(sleepers))
    assert contest.turns(2, work) == {OURS: [2.0, 2.0], "two": [2.0, 2.0]}
    assert contest.absent == {"one": "it fell over"}


def test_what_has_failed_to_install_is_told_and_not_tried_again(tmp_path: Path) -> None:
    package = Package("peer", "1.0")
    (tmp_path / "peer").mkdir()
    failed = {"wanted": json.dumps(package.installs), "why": "no wheel"}
    (tmp_path / "peer" / "failed.json").write_text(json.dumps(failed))
    with pytest.raises(Unavailable, match="could not be installed: no wheel"):
        ensure(package, tmp_path)


def test_an_environment_is_kept_while_its_pins_stay(tmp_path: Path) -> None:
    package = Package("peer", "1.0", ["mlx[cpu]"])
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "installed.json").write_text(json.dumps(package.installs))
    assert ensure(package, tmp_path) == tmp_path / "peer"


def test_a_bare_package_gets_what_stands_beside_it_and_no_dependency_of_its_own() -> None:
    assert Package("peer", "1.0", ["mlx[cpu]"], bare=True).installs == [["mlx[cpu]"], ["--no-deps", "peer==1.0"]]
    assert Package("peer", "1.0", ["mlx[cpu]"]).installs == [["peer==1.0", "mlx[cpu]"]]


def test_the_last_line_is_the_one_that_says_what_was_wrong() -> None:
    said = "Collecting peer\nERROR: No matching distribution found for peer==1.0\n\n[notice] A new release of pip\n"
    assert last_line(said) == "ERROR: No matching distribution found for peer==1.0"
    assert last_line("ImportError: no x\n\nERROR:    Application startup failed. Exiting.\n") == "ImportError: no x"
    assert last_line("") == "it said nothing"


FASTER = Target(1.0, Judged.RATIO, at_most=False)


def _contest() -> Contest:
    return Contest({}, absent={"vllm-mlx": "serves one model", "rapid-mlx": "x", "mlx-openai-server": "x"})


def _found() -> dict[str, list[float]]:
    return {OURS: [9.0, 8.0], "mlx_lm.server": [3.0, 4.0], "flyto-mlx": [18.0, 10.0]}


def test_a_peer_that_cannot_has_a_row_that_says_so() -> None:
    made = {row.peer_name: row for row in rows(_contest(), Needs(), "speed", "tok/s", _found(), target=FASTER)}
    assert made["vllm-mlx"].peer is None
    assert made["vllm-mlx"].met is None
    assert format_row(made["vllm-mlx"]).endswith("serves one model")
    assert made["flyto-mlx"].met is False


def test_the_table_has_a_line_a_figure_and_says_where_we_are_worse_and_who_has_none() -> None:
    contest = _contest()
    speed = rows(contest, Needs(), "speed", "tok/s", _found(), target=FASTER)
    lost = rows(contest, Needs(), "  lost", "", {name: [2.0] for name in _found()}, counts=True)
    documents = [{"bench": "peers-streams", **row.to_json()} for row in (*speed, *lost)]
    other = {"bench": "throughput", **documents[0]}
    machine = {"cores": 2, "cpu": "a processor", "system": "Linux", "backend": "cpu", "blas": "a BLAS"}
    lines = table([*documents, other | {"bench": "throughput"}], machine).splitlines()
    assert lines[0] == "| ours : theirs | mlx_lm.server | flyto-mlx | vllm-mlx | rapid-mlx | mlx-openai-server |"
    assert lines[2:4] == ["| speed | 2.50 | **0.650** | – | – | – |", "| lost | 2 : 2 | 2 : 2 | – | – | – |"]
    assert "* vllm-mlx: serves one model" in lines
    assert "2 cores of a processor, Linux, backend cpu with a BLAS." in lines
    assert len([line for line in lines if line.startswith("|")]) == 4


def test_an_environment_names_the_programs_beside_our_own_when_the_peer_has_no_package(tmp_path: Path) -> None:
    launch = Launch(_peer("").bin_folder(tmp_path), {"m": tmp_path}, Needs(), tmp_path, 1)
    assert launch.bin_folder == Path(sys.executable).parent
    assert subprocess.run([str(launch.bin_folder / "python"), "-c", ""], check=False).returncode == 0
