"""The difference between two manifests: what it names, and when each part of it takes effect."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.manifest import ApiSettings, DaemonSettings, Manifest, ModelSettings
from omlxd.core.manifest_diff import HIDDEN, Change, Effect, diff_manifests, in_force, key_of_field
from omlxd.core.memory import Policy
from omlxd.daemon.manifest_schema import ApiTable, DaemonTable, ModelTable

CHAT = ModelSettings("chat", path="/m/chat")
BIG = ModelSettings("big", repo="org/big")


def manifest(*models: ModelSettings, api: ApiSettings | None = None, **daemon: Any) -> Manifest:
    return Manifest(DaemonSettings(**daemon), api or ApiSettings(), {model.name: model for model in models}, "/m.toml")


def changes(running: Manifest, asked: Manifest) -> list[Change]:
    return list(diff_manifests(running, asked).changes)


def test_the_same_manifest_differs_in_nothing() -> None:
    assert not changes(manifest(CHAT, BIG), manifest(BIG, CHAT))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"max_memory": "8G"}, Change("daemon.max_memory", "auto", "8G", Effect.NOW)),
        ({}, {"drain_timeout_s": 90.0}, Change("daemon.drain_timeout", "30 s", "1 min 30 s", Effect.NOW)),
        ({"hard_limit": "9G"}, {}, Change("daemon.hard_limit", "9G", None, Effect.NOW)),
        ({}, {"policy": Policy.REFERENCE}, Change("daemon.policy", "graceful", "reference", Effect.NOW)),
        ({}, {"prefill_memory_guard": False}, Change("daemon.prefill_memory_guard", "true", "false", Effect.NOW)),
        ({}, {"prefill_chunk_tokens": 512}, Change("daemon.prefill_chunk", "256", "512", Effect.NOW)),
        ({}, {"log_max_size_bytes": 2**20}, Change("daemon.log_max_size", "20.0 MiB", "1.00 MiB", Effect.NOW)),
        ({}, {"max_batch": 8}, Change("daemon.max_batch", "32", "8", Effect.RESTART)),
    ],
)
def test_a_setting_of_the_daemon(before: dict[str, Any], after: dict[str, Any], expected: Change) -> None:
    assert changes(manifest(**before), manifest(**after)) == [expected]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"path": "/m/other"}, Change("models.chat.path", "/m/chat", "/m/other", Effect.WHEN_IDLE)),
        ({"max_context": 512}, Change("models.chat.max_context", None, "512", Effect.WHEN_IDLE)),
        ({"ttl_s": 600.0}, Change("models.chat.ttl", None, "10 min", Effect.NOW)),
        ({"pin": True}, Change("models.chat.pin", "false", "true", Effect.NOW)),
        ({"aliases": ("a", "b")}, Change("models.chat.aliases", "[]", "[a, b]", Effect.NOW)),
    ],
)
def test_a_setting_of_a_model(change: dict[str, Any], expected: Change) -> None:
    diff = diff_manifests(manifest(CHAT), manifest(replace(CHAT, **change)))
    assert list(diff.changes) == [expected]
    assert diff.reloaded == (("chat",) if expected.effect is Effect.WHEN_IDLE else ())


def test_models_that_come_and_go_are_one_change_each() -> None:
    diff = diff_manifests(manifest(BIG), manifest(replace(CHAT, name="qwen3.5", pin=True)))
    assert (diff.added, diff.removed, diff.reloaded) == (("qwen3.5",), ("big",), ())
    assert [(each.key, each.before, each.after) for each in diff.changes] == [
        ('models."qwen3.5"', None, "/m/chat"),
        ("models.big", "org/big", None),
    ]


def test_a_key_is_never_shown() -> None:
    one, other = (manifest(api=ApiSettings(api_key=key)) for key in ("secret-one", "secret-two"))
    assert changes(one, other) == [Change("api.api_key", HIDDEN, HIDDEN, Effect.NOW)]


def test_while_another_address_waits_for_a_restart_the_old_one_keeps_its_key() -> None:
    running = manifest(api=ApiSettings("0.0.0.0:1", api_key="secret-one"))
    asked = manifest(api=ApiSettings("127.0.0.1:1"), max_batch=8, max_waiting=3)
    diff = diff_manifests(running, asked)
    assert diff.restart_keys == ("daemon.max_batch", "api.listen", "api.api_key")
    now = in_force(running, asked)
    assert now.api == running.api
    assert (now.daemon.max_batch, now.daemon.max_waiting) == (32, 3)
    assert diff_manifests(now, asked).restart_keys == diff.restart_keys, "it is told again until there was a restart"


def test_every_field_is_a_key_of_the_manifest() -> None:
    for settings, table in ((DaemonSettings, DaemonTable), (ApiSettings, ApiTable), (ModelSettings, ModelTable)):
        keys = [key_of_field(field.name) for field in fields(settings) if field.name != "name"]
        assert keys == list(table.model_fields)


models = st.builds(
    ModelSettings,
    name=st.sampled_from(["a", "b", "c"]),
    path=st.sampled_from(["/1", "/2"]),
    pin=st.booleans(),
    ttl_s=st.sampled_from([None, 5.0]),
    max_context=st.sampled_from([None, 10]),
)
manifests = st.builds(
    lambda made, batch, listen, key: manifest(*made, api=ApiSettings(listen, api_key=key), max_batch=batch),
    st.lists(models, unique_by=lambda model: model.name),
    st.sampled_from([1, 2]),
    st.sampled_from(["off", "127.0.0.1:1"]),
    st.sampled_from([None, "secret-one"]),
)


@given(manifests, manifests)
def test_what_is_in_force_differs_from_what_was_asked_for_in_what_waits_for_a_restart_alone(
    running: Manifest, asked: Manifest
) -> None:
    diff, left = diff_manifests(running, asked), diff_manifests(in_force(running, asked), asked)
    assert left.restart_keys == diff.restart_keys
    assert all(change.effect is Effect.RESTART for change in left.changes)
    assert set(left.changes) <= set(diff.changes)
