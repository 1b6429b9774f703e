"""A lowered limit parks requests of a real daemon; their clients see a pause, and get the undisturbed text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import Daemon, errors_in, has_text, in_thread, text_of
from tests.acceptance.test_streams import codec_of, until_end
from tests.engine.driver import reference
from tests.engine.test_generation import same_until_a_tie

pytestmark = pytest.mark.mlx

LIMITS = {"policy": "graceful", "max_memory": "1G", "prefix_cache": 0}
TOKENS = 300


@pytest.mark.slow
def test_streamed_and_whole_answers_over_a_park_are_the_undisturbed_ones(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    folder = small()
    daemon = daemon_of({"chat": folder}, daemon=LIMITS)
    codec = codec_of(folder)
    contents = [f"{word} " * 60 for word in ("oldest", "streams", "at once")]
    prompts = {each: codec.encode_chat([{"role": "user", "content": each}]) for each in contents}
    daemon.control("POST", "models/chat/load")
    with daemon.chat_stream("chat", contents[0], max_tokens=TOKENS) as old:
        old_frames = [old.until(has_text)]
        with daemon.chat_stream("chat", contents[1], max_tokens=TOKENS) as new:
            new_frames = [new.until(has_text)]
            whole = in_thread(lambda: daemon.chat("chat", contents[2], max_tokens=TOKENS))
            daemon.until_event("request_started", request="r3")
            (model,) = daemon.status["models"]
            kv_bytes = model["committed_bytes"] - model["weights_bytes"]
            limit = model["weights_bytes"] + kv_bytes // 2  # more than one of the three is promised, less than two
            daemon.control("PATCH", "limits", {"max_memory": limit})
            for request in ("r3", "r2"):
                daemon.until_event("request_parked", request=request)
            states = {each["id"]: each["state"] for each in daemon.requests}
            assert (states["r2"], states["r3"]) == ("parked", "parked")
            assert "parked" in daemon.cli("requests").stdout
            assert daemon.control("PATCH", "limits", {"max_memory": "1G"})["level"] == "ok"
            new_frames += list(new)
        old_frames += list(old)
    answer = whole.result(60).json
    texts = [text_of(old_frames), text_of(new_frames), answer["choices"][0]["message"]["content"]]
    for (tokens, margins), text in zip(reference(folder, prompts, TOKENS).values(), texts, strict=True):
        assert same_until_a_tie(text, codec, *until_end(tokens, margins, codec.end_ids))
    for frames in (old_frames, new_frames):
        assert not errors_in(frames)
        finishes = [frame["choices"][0]["finish_reason"] for frame in frames[:-1]]
        assert [finish for finish in finishes if finish] in (["length"], ["stop"])
    assert new_frames[-2]["omlxd"]["prompt_tokens"] == len(prompts[contents[1]])
    assert answer["usage"]["prompt_tokens"] == len(prompts[contents[2]])
    assert new_frames[-2]["omlxd"]["generated_tokens"] == answer["usage"]["completion_tokens"] == TOKENS
    assert len(daemon.log("request_finished")) == 3
    assert {event["request"] for event in daemon.log("request_resumed")} == {"r2", "r3"}
    assert not daemon.log("request_aborted", "request_failed")
    daemon.until_idle()
    assert daemon.status["models"][0]["kv_bytes"] == 0
