"""The views on the wire."""

from __future__ import annotations

from dataclasses import asdict

from omlxd.core.states import (
    DaemonState,
    EnforcerView,
    EntryState,
    Level,
    MemoryView,
    ModelView,
    RequestState,
    RequestView,
    StatusView,
)

MODEL = ModelView(
    "chat",
    EntryState.LOADED,
    pinned=False,
    aliases=("default",),
    path="/models/chat",
    weights_bytes=5,
    kv_bytes=1,
    prefix_cache_bytes=0,
    committed_bytes=6,
    running=1,
    waiting=0,
    parked=0,
    tokens_per_s=None,
    last_used_s=0.0,
    ttl_left_s=None,
    load_progress=None,
    context_length=100,
    error=None,
)


def test_a_status_on_the_wire_has_every_field_of_every_view() -> None:
    memory = MemoryView(*range(10), "max_memory", "ram", 11, 12)
    request = RequestView("r1", "chat", RequestState.DECODE, 3, 3, 1, 0.5)
    status = StatusView(
        "1", 7, DaemonState.READY, 1.0, "cpu", "/m.toml", memory, EnforcerView("graceful", 1.0, Level.OK, 0), (MODEL,),
        (request,), ({"rung": "park"},),
    )  # fmt: skip
    told = status.to_json()
    assert next(iter(told)) == "schema"
    assert told == {**asdict(status), "models": [asdict(MODEL)], "requests": [asdict(request)]}
