"""What people get wrong, one row each: a clear message with a next step, the right exit status, and no harm done."""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import omlxd
from omlxd.core.errors import InvalidRequest
from tests.acceptance.harness import CHAT, MIB, Daemon, chat_body, weights_bytes

pytestmark = pytest.mark.mlx

Damage = Callable[[Path], object]


def edit_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def cut_short(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    with file.open("r+b") as shard:
        shard.truncate(file.stat().st_size // 2)


def remove_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def mix_up_tensors(folder: Path) -> None:
    """Both shards whole, but of another model."""
    edit_config(hidden_size=256)(folder)


# What is wrong with a model's folder, and what the message has to name.
DAMAGED: dict[str, tuple[Damage, str]] = {
    "missing-folder": (shutil.rmtree, "does not exist"),
    "no-config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "bad-config": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "no-weights": (remove_weights, "model*.safetensors"),
    "cut-shard": (cut_short, "model-00002-of-00002.safetensors"),
    "missing-shard": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        "model-00002-of-00002.safetensors",
    ),
    "unknown-type": (edit_config(model_type="perceptron"), "model type `perceptron`"),
    "wrong-tensors": (mix_up_tensors, "config.json"),
    "bad-tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}'), "tokenizer"),
    "no-tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
}


@dataclass
class Shop:
    """One daemon with a good model that is loaded, and damaged ones."""

    daemon: Daemon
    good: Path


@pytest.fixture(scope="module")
def shop(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root = tmp_path_factory.mktemp("damaged")
    whole = tiny_model("llama", 2_000_000, shards=2, seed=9)
    good = tiny_model("llama", 5_000_000, context=2048)
    models: dict[str, Path] = {"good": good}
    for name, (damage, _) in DAMAGED.items():
        models[name] = Path(shutil.copytree(whole, root / name))
        damage(models[name])
    models["too-big"] = tiny_model("llama", 60_000_000)
    with Daemon(models, daemon={"max_memory": "40M", "hard_limit": "60M"}) as daemon:
        yield Shop(daemon, good)


@pytest.fixture
def no_harm(shop: Shop) -> Iterator[Daemon]:
    """The daemon; afterwards the good model still answers, nothing was evicted, and memory is what it was."""
    daemon = shop.daemon
    assert daemon.chat("good", "Hello.", max_tokens=4).status == 200
    before, pid = daemon.memory, daemon.pid
    yield daemon
    daemon.until_idle()
    after = daemon.status
    assert after["pid"] == pid
    assert after["state"] == "ready"
    held, held_before = (memory["active"] - memory["prefix_cache"] for memory in (after["memory"], before))
    assert held == pytest.approx(held_before, abs=MIB)
    assert after["memory"]["footprint"] < before["footprint"] + 15 * MIB
    assert [model["name"] for model in after["models"] if model["state"] == "loaded"] == ["good"]
    assert not daemon.log("unloaded", "decision")
    answer = daemon.chat("good", "Hello.", max_tokens=4)
    assert answer.json["choices"][0]["finish_reason"] == "length"


def says(done: Any, status: int, *named: str) -> None:
    """One error with what it has to name, one hint, nothing on stdout, and no traceback."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1
    assert re.search(r"^hint: \S.+", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr
    for text in named:
        assert text in done.stderr, done.stderr


# Models


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_model_is_refused_with_what_is_wrong(name: str, no_harm: Daemon) -> None:
    _, named = DAMAGED[name]
    says(no_harm.cli("load", name), 1, named)
    says(no_harm.cli("run", name, "Hello."), 1, named)
    (model,) = [model for model in no_harm.control("GET", "models")["models"] if model["name"] == name]
    assert model["state"] == "failed"
    assert named in model["error"]


def test_omlxd_check_tells_about_all_damaged_models_without_loading_them(no_harm: Daemon) -> None:
    checked = no_harm.cli("check")
    assert checked.returncode != 0
    told = checked.stdout + checked.stderr
    assert "Traceback" not in told
    for name in ("missing-folder", "no-config", "bad-config", "no-weights", "cut-shard", "missing-shard"):
        assert name in told


def test_a_model_that_was_repaired_loads_again(
    daemon_of: Callable[..., Daemon], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    whole = tiny_model("llama", 2_000_000, shards=2, seed=9)
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    cut_short(folder)
    daemon = daemon_of({"chat": folder})
    says(daemon.cli("load", "chat"), 1, "model-00002-of-00002.safetensors")
    shutil.copy(whole / "model-00002-of-00002.safetensors", folder)
    assert daemon.cli("run", "chat", "Hello.", "--max-tokens", "4").returncode == 0


@pytest.mark.parametrize("command", [("load",), ("unload",), ("pin",), ("unpin",), ("run",)])
def test_an_unknown_model_costs_the_loaded_ones_nothing(command: tuple[str, ...], no_harm: Daemon) -> None:
    prompt = ("Hello.",) if command == ("run",) else ()
    says(no_harm.cli(*command, "goood", *prompt), 4, "`goood`", "did you mean `good`?")


def test_a_model_that_can_never_fit_is_refused_before_anything_is_evicted(no_harm: Daemon) -> None:
    says(no_harm.cli("load", "too-big"), 5, "`too-big`", "40.0 MiB")
    assert no_harm.chat("too-big", "Hello.").status == 507


# Requests


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(no_harm: Daemon) -> None:
    for stream in (False, True):
        answer = no_harm.chat("good", "x" * 3000, stream=stream)
        error = answer.json["error"]
        assert answer.status == 400
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
        assert error["hint"]
    says(no_harm.cli("run", "good", "x" * 3000), 2, "2048")


BAD_BODIES: dict[str, tuple[Any, str, str | None]] = {
    "unknown field": (chat_body("good", "Hello.", best_of=4), "`best_of`", "best_of"),
    "misspelt field": (chat_body("good", "Hello.", max_tokns=4), "did you mean `max_tokens`?", "max_tokns"),
    "no messages": ({"model": "good"}, "`messages`", "messages"),
    "wrong type": (chat_body("good", "Hello.", max_tokens="4"), "`max_tokens`", "max_tokens"),
    "no tokens": (chat_body("good", "Hello.", max_tokens=0), "`max_tokens`", "max_tokens"),
    "too hot": (chat_body("good", "Hello.", temperature=3), "`temperature`", "temperature"),
    "an image": (
        {"model": "good", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        None,
    ),
    "broken JSON": (b'{"model": "good", "messages": [', "not JSON", None),
    "a list": (b"[]", "JSON object", None),
    "bytes": (b"\xff\xfe\x00", "not JSON", None),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_bad_chat_body_is_a_400_that_names_the_field(case: str, no_harm: Daemon) -> None:
    body, named, param = BAD_BODIES[case]
    answer = no_harm.ask("POST", CHAT, body)
    error = answer.json["error"]
    assert answer.status == 400
    assert error["type"] == "invalid_request_error"
    assert named in f"{error['message']} {error['hint']}"
    if param is not None:
        assert error["param"] == param


async def test_token_ids_beyond_the_vocabulary_are_refused_and_the_model_goes_on(
    small: Callable[..., Path],
) -> None:
    async with omlxd.EnginePool({"chat": small()}) as pool:
        for tokens, bad in (([5, 512], 512), ([5, -1], -1), ([2**40], 2**40)):
            with pytest.raises(InvalidRequest, match=f"token id {bad} .*512") as refused:
                await pool.generate("chat", tokens=tokens, max_tokens=4).text()
            assert refused.value.hint
        with pytest.raises(InvalidRequest):
            pool.generate("chat", tokens=[])
        assert await pool.generate("chat", tokens=[5, 511], max_tokens=4).text()


# Sizes and limits


@pytest.mark.parametrize("size", ["lots", "8 apples", "-1", "101%", "1e9", ""])
def test_a_size_that_does_not_parse_changes_nothing(size: str, no_harm: Daemon) -> None:
    says(no_harm.cli("limit", "--", size), 2)
    refused = no_harm.ask("PATCH", "/v1/control/limits", {"max_memory": size})
    assert refused.status == 400
    assert refused.json["error"]["hint"]
    assert no_harm.memory["soft_limit"] == 40 * MIB


def test_a_limit_above_the_explicit_hard_limit_changes_nothing(no_harm: Daemon) -> None:
    says(no_harm.cli("limit", "1G"), 2, "`hard_limit`")
    assert no_harm.memory["soft_limit"] == 40 * MIB


@pytest.mark.parametrize("option", ["--max-memory", "--hard-limit"])
def test_a_size_that_does_not_parse_starts_nothing(option: str, home_of: Callable[..., Daemon]) -> None:
    daemon = home_of({})
    says(daemon.start(option, "lots"), 2, "`lots`")
    says(daemon.cli("status"), 3)


# Starting


MANIFESTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "several problems": (
        '[daemon]\nmax_memory = "lots"\npoll_interval = "soon"\n[models.a]\npath = 3\n[models.b]\n',
        ("4 problems", "daemon.max_memory", "daemon.poll_interval", "models.a.path", "models.b"),
    ),
    "unknown key": ('[daemon]\nmax_memori = "1G"\n', ("daemon.max_memori", "did you mean `max_memory`?", "line 2")),
    "unknown table": ("[deamon]\n", ("deamon", "did you mean `daemon`?")),
    "not TOML": ('[daemon\nmax_memory = "1G"\n', ("line 1",)),
    "hard below soft": ('[daemon]\nmax_memory = "2G"\nhard_limit = "1G"\n', ("daemon.hard_limit",)),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_bad_manifest_is_told_with_all_its_problems(case: str, home_of: Callable[..., Daemon]) -> None:
    text, named = MANIFESTS[case]
    daemon = home_of(text=text)
    says(daemon.start(), 78, *named)
    assert daemon.cli("check").returncode == 78
    says(daemon.cli("status"), 3)


def test_a_missing_manifest_says_how_to_write_one(home_of: Callable[..., Daemon]) -> None:
    daemon = home_of({})
    (daemon.home / "omlxd.toml").unlink()
    says(daemon.start(), 78, "does not exist", "omlxd init")


def test_a_pinned_model_larger_than_the_limit_is_the_manifests_mistake(
    home_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = home_of({"chat": {"path": small(), "pin": True}}, daemon={"max_memory": weights_bytes(small()) // 2})
    says(daemon.start(), 78, "models.chat.pin", "max_memory")
    assert not (daemon.home / "omlxd.sock").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("load", "chat"),
        ("unload", "chat"),
        ("pin", "chat"),
        ("limit", "1G"),
        ("run", "chat", "Hello."),
        ("stop",),
    ],
)
def test_without_a_daemon_every_command_says_so(command: tuple[str, ...], home_of: Callable[..., Daemon]) -> None:
    says(home_of({}).cli(*command), 3, "not running", "omlxd start")


def test_a_socket_path_that_is_too_long_says_what_to_do(home_of: Callable[..., Daemon]) -> None:
    root = Path(tempfile.mkdtemp(prefix="omlxd-", dir="/tmp"))
    home = root / ("x" * 100)
    home.mkdir(mode=0o700)
    try:
        daemon = home_of({}, home=home)
        says(daemon.start(), 1, "103", "OMLXD_HOME")
        says(daemon.cli("status"), 3, "103", "OMLXD_HOME")
    finally:
        shutil.rmtree(root)


def test_a_port_that_is_taken_names_the_key_and_starts_nothing(home_of: Callable[..., Daemon]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = home_of({}, api={"listen": f"127.0.0.1:{port}"})
        says(daemon.start(), 1, str(port), "api.listen")
    assert not (daemon.home / "omlxd.sock").exists()
    assert daemon.start().returncode == 0
    assert daemon.cli("stop").returncode == 0
