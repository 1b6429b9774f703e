"""The manifest as data: addresses, names, limits on a machine, and what `omlxd init` writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.errors import InvalidRequest, UnknownModel
from omlxd.core.limits import Machine
from omlxd.core.manifest import (
    ApiSettings,
    DaemonSettings,
    ListenAddress,
    Manifest,
    ModelSettings,
    is_model_name,
    max_memory_bytes,
    parse_listen,
)
from omlxd.core.wording import nearest, shown

GIB = 2**30
MACHINE = Machine(ram_bytes=64 * GIB, device_cap_bytes=48 * GIB, device_cap_source="metal")


def manifest(*models: ModelSettings) -> Manifest:
    return Manifest(models={model.name: model for model in models})


@pytest.mark.parametrize(
    ("written", "host", "port", "is_loopback"),
    [
        ("127.0.0.1:8321", "127.0.0.1", 8321, True),
        ("127.9.9.9:1", "127.9.9.9", 1, True),
        ("localhost:0", "localhost", 0, True),
        ("LOCALHOST:80", "localhost", 80, True),
        ("[::1]:8321", "::1", 8321, True),
        (" [::]:8321 ", "::", 8321, False),
        ("0.0.0.0:8321", "0.0.0.0", 8321, False),
        ("127.1:8321", "127.1", 8321, False),
        ("my-mac.local:65535", "my-mac.local", 65535, False),
    ],
)
def test_an_address_is_a_host_and_a_port(written: str, host: str, port: int, is_loopback: bool) -> None:
    address = parse_listen(written)
    assert address == ListenAddress(host, port)
    assert address.is_loopback is is_loopback


@pytest.mark.parametrize("written", ["", " ", "off", "OFF"])
def test_tcp_can_be_turned_off(written: str) -> None:
    assert parse_listen(written) is None


@pytest.mark.parametrize(
    "written",
    ["8321", ":8321", "127.0.0.1", "127.0.0.1:", "::1:8321", "[::1]", "[127.0.0.1]:1", "a b:1", "*:80", "http://x:80",
     "localhost:99999", "localhost:-1", "localhost:٣"],
)  # fmt: skip
def test_what_is_not_an_address_is_refused_with_a_hint(written: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_listen(written)
    assert refused.value.hint


@pytest.mark.parametrize("name", ["a", "chat", "Qwen3-8B_4bit", "qwen3.5", "llama:8b", "4", "x" * 100])
def test_these_are_model_names(name: str) -> None:
    assert is_model_name(name)


@pytest.mark.parametrize("name", ["", "-x", ".", "..", ".x", "_x", ":x", "a/b", "a b", "ä", "x" * 101, "a\n", "a%2F"])
def test_these_are_not_model_names(name: str) -> None:
    assert not is_model_name(name)


def test_a_model_is_found_by_its_name_and_by_its_alias() -> None:
    chat = ModelSettings("chat", path="/m", aliases=("default",))
    assert manifest(chat).model("chat") is manifest(chat).model("default") is chat
    assert manifest(chat).names() == ("chat", "default")


def test_an_unknown_model_names_the_nearest_one() -> None:
    with pytest.raises(UnknownModel, match="no model `Caht`") as unknown:
        manifest(ModelSettings("chat", path="/m"), ModelSettings("small", path="/m")).model("Caht")
    assert unknown.value.hint == "did you mean `chat`?"


def test_an_unknown_model_that_is_like_no_other_points_to_the_list() -> None:
    with pytest.raises(UnknownModel) as unknown:
        manifest().model("zzz")
    assert "omlxd models" in (unknown.value.hint or "")


@pytest.mark.parametrize(
    ("written", "size_gib"), [("auto", 43.2), (" AUTO ", 43.2), ("50%", 32), ("8G", 8), (8 * GIB, 8), ("0", 0)]
)
def test_a_written_soft_limit_is_bytes_on_a_machine(written: str | int, size_gib: float) -> None:
    assert max_memory_bytes(written, MACHINE) == int(size_gib * GIB)


def test_settings_resolve_to_limits_on_a_machine() -> None:
    limits = DaemonSettings(max_memory="25%", hard_limit="17G").memory_limits(MACHINE)
    assert (limits.soft_bytes, limits.hard_bytes) == (16 * GIB, 17 * GIB)


def test_the_key_is_not_in_the_settings_text() -> None:
    assert "secret-secret" not in repr(Manifest(api=ApiSettings(api_key="secret-secret")))


def test_nearest_gives_back_the_candidate_as_it_is_written() -> None:
    assert nearest("CHT", ["Chat", "small"]) == "Chat"
    assert nearest("x" * 10_000, ["Chat"]) is None


@given(st.text(max_size=200))
def test_shown_text_is_one_short_printable_line_that_can_be_encoded(text: str) -> None:
    assert shown(text).isprintable()
    assert len(shown(text)) <= 80
    shown(text).encode()
