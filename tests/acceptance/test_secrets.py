"""Nothing that a user writes, and no key, is ever found in what the daemon leaves on the disk."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.harness import CHAT, Daemon
from tests.fakes.wire import Answer, ask
from tests.faults.broken_daemon import break_next

pytestmark = pytest.mark.mlx

PROMPT, KEY, WRONG_KEY, COOKIE = "zebra-in-the-prompt", "zebra-is-the-key", "zebra-is-a-wrong-key", "zebra-in-a-cookie"
SECRET = "zebra"
REFUSES = "{% if messages[0].content != 'fine' %}{{ raise_exception('no ' ~ messages[0].content) }}{% endif %}fine"


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}, {"role": "user", "content": text}]


# Each is sent over TCP with the key, as an application does it.
BODIES: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {"model": "chat", "messages": messages(PROMPT), "max_tokens": 4}),
    "chat-stream": (CHAT, {"model": "chat", "messages": messages(PROMPT), "max_tokens": 4, "stream": True}),
    "completion": ("/v1/completions", {"model": "chat", "prompt": PROMPT, "max_tokens": 4, "stop": [PROMPT]}),
    "messages": ("/v1/messages", {"model": "chat", "messages": messages(PROMPT)[1:], "max_tokens": 4}),
    "tokens": ("/v1/messages/count_tokens", {"model": "chat", "messages": messages(PROMPT)[1:]}),
    "too-long": (CHAT, {"model": "chat", "messages": messages(PROMPT * 2000)}),
    "refused-by-the-template": (CHAT, {"model": "picky", "messages": messages(PROMPT)}),
    "unknown-field": (CHAT, {"model": "chat", "messages": messages(PROMPT), PROMPT: PROMPT}),
    "wrong-type": (CHAT, {"model": "chat", "messages": PROMPT}),
    "wrong-role": (CHAT, {"model": "chat", "messages": [{"role": PROMPT, "content": PROMPT}]}),
    "no-json": (CHAT, f'{{"model": "chat", "messages": "{PROMPT}'.encode()),
    "a-tool": (
        CHAT,
        {
            "model": "chat",
            "messages": messages(PROMPT),
            "max_tokens": 4,
            "tools": [{"type": "function", "function": {"name": "f", "description": PROMPT, "parameters": {}}}],
        },
    ),
    "query": (f"{CHAT}?q={PROMPT}", {"model": "chat", "messages": messages(PROMPT), "max_tokens": 4}),
}


def test_no_prompt_and_no_key_is_ever_written_down(
    home_of: Callable[..., Daemon], small: Callable[..., Path], tmp_path: Path
) -> None:
    picky = shutil.copytree(small(), tmp_path / "picky")
    config = json.loads((picky / "tokenizer_config.json").read_text())
    (picky / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": REFUSES}))
    daemon = home_of(
        {"chat": small(), "picky": picky},
        daemon={"log_level": "debug"},
        api={"api_key": KEY},
        module="tests.faults.broken_daemon",
    ).spawn("--foreground")
    host, _, port = daemon.ready["api"].rpartition(":")
    door = (host, int(port))

    def post(path: str, body: Any, key: str = KEY) -> Answer:
        return ask(door, "POST", path, body, {"Authorization": f"Bearer {key}", "Cookie": COOKIE})

    statuses = {name: post(path, body).status for name, (path, body) in BODIES.items()}
    assert {name for name, status in statuses.items() if status == 200} >= {"chat", "chat-stream", "messages", "query"}
    assert post(*BODIES["chat"], key=WRONG_KEY).status == 401
    for garbage in (f"{PROMPT}\r\n\r\n", f"GET /{PROMPT} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n{PROMPT}\r\n\r\n"):
        with socket.create_connection(door, timeout=20) as raw:
            raw.sendall(garbage.encode())
            raw.recv(1000)
    break_next(daemon.home, "token", f"ValueError {PROMPT}")
    assert PROMPT in str(post(*BODIES["chat"]).json)
    asked = break_next(daemon.home, "plan", f"KeyError {PROMPT}")
    while asked.exists():  # it may happen to a plan without a request
        post(*BODIES["chat"])
    assert post(*BODIES["chat"]).status == 200
    daemon.process.send_signal(signal.SIGUSR1)
    assert daemon.terminate() == 0

    assert {line["event"] for line in daemon.log()} >= {"request_finished", "request_failed", "request_refused"}
    assert len(daemon.log("engine_failed")) == 2
    written = {path.name: path.read_bytes() for path in daemon.home.rglob("*") if path.is_file()}
    assert written.keys() >= {"omlxd.jsonl", "stacks.txt", "test.err", "omlxd.toml"}
    del written["omlxd.toml"]  # the key's own place
    found = {name: text.partition(SECRET.encode())[0][-200:] for name, text in written.items() if b"zebra" in text}
    assert not found
