"""Which tokenizers are kept, for whom, and what the base footprint is told of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omlxd.engine import warm_codecs
from omlxd.engine.orders import LoadOrder
from omlxd.engine.warm_codecs import WarmCodecs

MOST = 3


@pytest.fixture
def base() -> list[int]:
    """What the base footprint was told."""
    return []


@pytest.fixture
def codecs(base: list[int], monkeypatch: pytest.MonkeyPatch) -> WarmCodecs:
    monkeypatch.setattr(warm_codecs, "MOST_UNUSED", MOST)
    return WarmCodecs(base.append)


def order(model: str, path: str | None = None, max_context: int | None = None) -> LoadOrder:
    return LoadOrder(1, model, path or f"/models/{model}", max_context=max_context)


def codec() -> Any:
    return SimpleNamespace(grammars=SimpleNamespace(grown=None))


def test_the_same_files_are_read_once_for_all_models_that_have_them(codecs: WarmCodecs) -> None:
    made = codec()
    codecs.keep(order("a", "/models/x"), "stamp", object(), made, 100)
    assert codecs.known(order("b", "/models/x"), "stamp") is made
    assert codecs.of_model("b") is codecs.of_model("a") is made
    for other in (order("c", "/models/y"), order("c", "/models/x", 512)):
        assert codecs.known(other, "stamp") is None
    assert codecs.known(order("a", "/models/x"), "changed") is None


def test_other_files_that_say_the_same_make_no_other_tokenizer(codecs: WarmCodecs, base: list[int]) -> None:
    made = codec()
    codecs.keep(order("a"), 1, ("digest", 512), made, 100)
    assert codecs.alike(order("b"), 1, ("digest", 1024)) is None
    assert codecs.alike(order("b"), 1, ("digest", 512)) is made
    assert codecs.known(order("c", "/models/b"), 1) is made
    for name in "abc":
        assert sum(base) == 100
        codecs.forget(name)
    assert sum(base) == 0


def test_of_models_that_are_not_loaded_the_ones_used_last_stay(codecs: WarmCodecs, base: list[int]) -> None:
    codecs.use({"loaded"})
    codecs.keep(order("loaded"), 1, object(), codec(), 10)
    for number in range(MOST):
        codecs.keep(order(f"m{number}"), 1, object(), codec(), 100 + number)
    codecs.of_model("m0")
    codecs.keep(order("new"), 1, object(), codec(), 200)
    assert [codecs.of_model(name) is not None for name in ("loaded", "m0", "m1", "m2", "new")] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert base[-1] == -101
    assert len(codecs) == MOST + 1


def test_a_model_that_is_unloaded_takes_its_place_among_the_others(codecs: WarmCodecs, base: list[int]) -> None:
    models = {f"m{number}" for number in range(MOST + 2)}
    codecs.use(models)
    for number in range(MOST + 2):
        codecs.keep(order(f"m{number}"), 1, object(), codec(), 10)
    assert len(codecs) == MOST + 2
    codecs.use(frozenset())
    assert len(codecs) == MOST
    assert codecs.of_model("m0") is codecs.of_model("m1") is None
    assert sum(base) == 10 * MOST


def test_what_two_models_share_is_given_back_with_the_last_of_them(codecs: WarmCodecs, base: list[int]) -> None:
    codecs.keep(order("a", "/models/x"), 1, object(), codec(), 100)
    codecs.known(order("b", "/models/x"), 1)
    codecs.forget("a")
    assert sum(base) == 100
    codecs.forget("b")
    codecs.forget("b")
    assert sum(base) == 0


def test_a_newer_one_takes_the_place_of_a_models_older_one(codecs: WarmCodecs, base: list[int]) -> None:
    codecs.keep(order("a"), 1, object(), codec(), 100)
    newer = codec()
    codecs.keep(order("a"), 2, object(), newer, 70)
    assert codecs.of_model("a") is newer
    assert sum(base) == 70


def test_a_grammars_table_belongs_to_its_tokenizer(codecs: WarmCodecs, base: list[int]) -> None:
    made = codec()
    codecs.keep(order("a"), 1, object(), made, 100)
    made.grammars.grown(30)
    assert sum(base) == 130
    codecs.forget("a")
    assert sum(base) == 0


def test_a_footprint_that_fell_meanwhile_takes_nothing_from_the_base(codecs: WarmCodecs, base: list[int]) -> None:
    codecs.keep(order("a"), 1, object(), codec(), -50)
    codecs.forget("a")
    assert sum(base) == 0
