"""Loads: in slices, cancellable, refused before the hard limit, and broken folders that leave nothing behind."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.core.errors import DoesNotFit, LoadCancelled, LoadFailed
from omlxd.core.states import FinishReason
from omlxd.engine import mlxlm
from omlxd.engine.events import Generated, LoadDone, LoadEnded, LoadProgress, OverLimit, RequestGone, Unloaded
from omlxd.engine.orders import MIB, EngineLimits
from tests.engine.driver import Driver, generation

pytestmark = pytest.mark.mlx

NOTHING = 4096
"""Bytes of scalars that MLX keeps for good after the first models ran."""


@pytest.fixture
def big(tiny_model: Callable[..., Path]) -> Path:
    """A model of several slices."""
    return tiny_model("llama", 300 * MIB, layers=8)


def active(driver: Driver) -> int:
    return driver.engine.rest().result().active_bytes


def test_a_load_reports_progress_slice_by_slice_and_takes_what_the_files_say(driver: Driver, big: Path) -> None:
    done = driver.load("big", big)
    assert isinstance(done, LoadDone)
    marks = [event.done_bytes for event in driver.seen if isinstance(event, LoadProgress)]
    assert marks == sorted(marks)
    assert len(marks) >= 5
    assert marks[-1] == done.info.weights_bytes
    assert abs(active(driver) - done.info.weights_bytes) < NOTHING


def test_a_cancelled_load_stops_half_way_returns_its_memory_and_the_next_one_works(driver: Driver, big: Path) -> None:
    driver.apply(load=driver.order("big", big))
    driver.until(LoadProgress, lambda event: event.done_bytes > 64 * MIB)
    driver.apply(load=None)
    ended = driver.until(LoadEnded)
    assert isinstance(ended.error, LoadCancelled)
    assert active(driver) < NOTHING
    marks = [event for event in driver.seen if isinstance(event, LoadProgress)]
    assert marks[-1].done_bytes < marks[-1].total_bytes
    assert isinstance(driver.load("big", big), LoadDone)
    assert driver.run(generation("r", "big", [5, 6], 4))["r"][1] is FinishReason.LENGTH


def test_a_load_that_would_pass_the_hard_limit_stops_before_it(driver: Driver, big: Path) -> None:
    hard = 150 * MIB
    driver.apply(limits=EngineLimits(hard_bytes=hard))
    ended = driver.load("big", big)
    assert isinstance(ended, LoadEnded)
    assert isinstance(ended.error, DoesNotFit)
    assert ended.error.details["hard_limit_bytes"] == hard
    assert driver.engine.sampler.peak_total_bytes <= hard
    assert active(driver) < NOTHING


def test_a_load_over_the_soft_limit_stands_still_until_the_loop_has_decided(driver: Driver, big: Path) -> None:
    driver.apply(load=driver.order("big", big), limits=EngineLimits(soft_bytes=100 * MIB, pause_above_bytes=100 * MIB))
    over = driver.until(OverLimit)
    assert over.reading.at_rest
    assert over.reading.active_bytes > 100 * MIB
    assert active(driver) == over.reading.active_bytes, "it went on while over the limit"
    driver.apply(load=None)
    driver.until(LoadEnded)
    assert active(driver) < NOTHING


def test_a_request_over_the_soft_limit_stands_still_and_goes_when_the_plan_says_so(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    done = driver.load("m", tiny_model())
    assert isinstance(done, LoadDone)
    soft = done.info.weights_bytes + 2_000_000
    driver.apply(limits=EngineLimits(soft_bytes=soft, pause_above_bytes=soft))
    driver.start(generation("long", "m", [7] * 3000, 500))
    driver.until(OverLimit)
    driver.drop("long")
    driver.until(RequestGone)
    assert active(driver) <= soft
    assert driver.run(generation("short", "m", [5, 6], 5))["short"][1] is FinishReason.LENGTH


def test_a_resident_model_generates_while_another_loads(
    driver: Driver, big: Path, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.start(generation("r", "m", [5, 6, 7], 5000))
    driver.until(Generated)
    driver.apply(load=driver.order("big", big), resident=frozenset({"m", "big"}))
    start = len(driver.seen)
    driver.until(LoadDone)
    kinds = [type(event) for event in driver.seen[start:]]
    assert kinds.count(Generated) >= kinds.count(LoadProgress) - 1, "the stream stood still during the load"


def test_a_finished_load_stays_until_a_plan_made_after_it_leaves_it_out(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.apply(load=driver.order("m", tiny_model()), resident=frozenset())
    done = driver.until(LoadDone)
    driver.engine.apply(driver.plan)  # the loop has not seen LoadDone yet: its plan says nothing about the model
    assert active(driver) > done.info.weights_bytes - NOTHING
    driver.apply(load=None, resident=frozenset())
    assert driver.until(Unloaded).reading.active_bytes < NOTHING


def test_ten_loads_and_unloads_leave_the_memory_as_it_was(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", 20_000_000)
    footprints = []
    for cycle in range(10):
        assert isinstance(driver.load("m", path), LoadDone)
        driver.run(generation(f"r{cycle}", "m", [5, 6, 7], 8))
        reading = driver.unload("m").reading
        assert reading.active_bytes < NOTHING
        assert reading.cache_bytes == 0
        footprints.append(reading.footprint_bytes - reading.base_bytes)
    assert footprints[-1] - footprints[1] < 8 * 1_000_000, footprints


def config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    (folder / "config.json").write_text(json.dumps(values))


def cut(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])


def replace_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)


BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated data": (lambda folder: cut(folder, -100_000), "bad_weights"),
    "truncated header": (lambda folder: cut(folder, 100), "bad_weights"),
    "empty weights": (lambda folder: replace_weights(folder, b""), "bad_weights"),
    "garbage weights": (lambda folder: replace_weights(folder, b"\x91" * 5000), "bad_weights"),
    "absurd header length": (lambda folder: replace_weights(folder, struct.pack("<Q", 1 << 40) + b"{}"), "bad_weights"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "missing_file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "missing_file"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{bad"), "bad_config"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "bad_config"),
    "no model type": (lambda folder: config(folder, model_type=None), "bad_config"),
    "unsupported model type": (lambda folder: config(folder, model_type="frobnicate"), "unsupported_model"),
    "a field is missing": (lambda folder: config(folder, hidden_size=None), "bad_config"),
    "wrong width": (lambda folder: config(folder, hidden_size=192), "weights_mismatch"),
    "more layers than weights": (lambda folder: config(folder, num_hidden_layers=9), "weights_mismatch"),
    "wants to run code": (lambda folder: config(folder, model_file="evil.py"), "remote_code"),
    "tokenizer is no JSON": (lambda folder: (folder / "tokenizer.json").write_text('{"a":'), "bad_tokenizer"),
    "tokenizer of another shape": (lambda folder: (folder / "tokenizer.json").write_text('{"a":1}'), "bad_tokenizer"),
    "no folder": (lambda folder: shutil.rmtree(folder), "missing_folder"),
}


@pytest.mark.parametrize("case", BREAK)
def test_a_broken_folder_ends_in_a_clear_error_and_costs_nobody_anything(
    case: str, driver: Driver, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    good = tiny_model()
    broken = tmp_path / "broken"
    shutil.copytree(good, broken)
    spoil, kind = BREAK[case]
    spoil(broken)
    driver.load("good", good)
    before = active(driver)
    ended = driver.load("bad", broken)
    assert isinstance(ended, LoadEnded)
    assert isinstance(ended.error, LoadFailed), ended.error
    assert ended.error.details["kind"] == kind, ended.error
    assert ended.error.hint
    assert "omlxd check" not in ended.error.hint, "the daemon has checked the folder before it ordered the load"
    assert "Traceback" not in str(ended.error)
    assert abs(active(driver) - before) < NOTHING
    assert driver.run(generation("r", "good", [5, 6], 4))["r"][1] is FinishReason.LENGTH


@pytest.mark.parametrize("goes", [shutil.rmtree, lambda folder: (folder / "tokenizer.json").unlink()])
def test_files_that_disappear_during_a_load_are_said_to_have_disappeared(
    goes: Callable[[Path], object],
    driver: Driver,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    load_tokenizer = mlxlm.load_tokenizer

    def too_late(path: Path, config: dict[str, object]) -> object:
        goes(path)
        return load_tokenizer(path, config)

    monkeypatch.setattr(mlxlm, "load_tokenizer", too_late)
    ended = driver.load("x", folder)
    assert isinstance(ended, LoadEnded)
    assert isinstance(ended.error, LoadFailed)
    assert ended.error.message == "the files of `x` disappeared while it was loaded"
    assert ended.error.details["kind"] == "missing_folder"


def test_others_answers_go_on_while_a_tokenizer_is_read(
    driver: Driver, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.load("a", tiny_model())
    other = shutil.copytree(tiny_model(), tmp_path / "other")
    (other / "chat_template.jinja").write_text("another tokenizer")
    driver.start(generation("r", "a", [5, 6, 7], 100_000))
    load_tokenizer, read = mlxlm.load_tokenizer, threading.Event()

    def when_told(folder: Path, config: dict[str, object]) -> object:
        assert read.wait(60)
        return load_tokenizer(folder, config)

    monkeypatch.setattr(mlxlm, "load_tokenizer", when_told)
    driver.apply(load=driver.order("b", other), resident=frozenset({"a", "b"}))
    for _ in range(50):  # it would stand still for good
        driver.until(Generated)
    assert not [event for event in driver.seen if isinstance(event, LoadProgress) and event.model == "b"]
    read.set()
    driver.until(LoadDone, lambda event: event.model == "b")
    assert driver.engine.codec("b") is not None
    driver.drop("r")


def test_models_whose_tokenizers_say_the_same_share_one_until_its_files_change(
    driver: Driver, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    driver.load("a", tiny_model())
    other = shutil.copytree(tiny_model(), tmp_path / "other")
    driver.load("b", other)
    assert driver.engine.codec("b") is driver.engine.codec("a")
    driver.unload("b")
    (other / "chat_template.jinja").write_text("another tokenizer")
    driver.load("b", other)
    assert driver.engine.codec("b") is not driver.engine.codec("a")


def test_a_load_is_cancelled_while_its_tokenizer_is_read_and_may_begin_again_at_once(
    driver: Driver, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokenizer, begun, read = mlxlm.load_tokenizer, threading.Event(), threading.Event()

    def when_told(folder: Path, config: dict[str, object]) -> object:
        begun.set()
        assert read.wait(60)
        return load_tokenizer(folder, config)

    monkeypatch.setattr(mlxlm, "load_tokenizer", when_told)
    driver.apply(load=driver.order("m", tiny_model()))
    assert begun.wait(60)
    driver.apply(load=None)
    assert isinstance(driver.until(LoadEnded).error, LoadCancelled)
    assert active(driver) < NOTHING
    read.set()
    assert isinstance(driver.load("m", tiny_model()), LoadDone)


def test_a_folder_with_glob_characters_in_its_name_loads(
    driver: Driver, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    odd = tmp_path / "a [1] * ? b"
    shutil.copytree(tiny_model(), odd)
    assert isinstance(driver.load("odd", odd), LoadDone)


def test_a_tokenizer_is_read_without_the_model_and_speaks_like_the_loaded_one(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model()
    messages = [{"role": "user", "content": "How long am I?"}]
    alone = driver.engine.read_codec(driver.order("m", folder, max_context=99))
    assert driver.engine.codec("m") is alone
    assert active(driver) < NOTHING
    assert not driver.seen
    assert isinstance(driver.load("m", folder, max_context=99), LoadDone)
    loaded = driver.engine.codec("m")
    assert loaded is not None
    assert loaded.encode_chat(messages) == alone.encode_chat(messages)
    assert (loaded.vocab_size, loaded.context_length) == (alone.vocab_size, alone.context_length)


def test_a_tokenizer_that_is_not_there_is_a_failed_load(driver: Driver, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(LoadFailed):
            driver.engine.read_codec(driver.order("m", folder))
