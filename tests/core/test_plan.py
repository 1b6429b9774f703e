"""Plans: what fits, who would go, how far it goes and which limit binds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.limits import MemoryLimits
from omlxd.core.plan import Neighbour, Planner, Wish
from omlxd.core.units import format_bytes

MIB = 2**20


@dataclass(frozen=True)
class Costs:
    """1 KiB of KV a token, 64 KiB in passing for each token of a chunk."""

    certain: bool = True

    def kv_bytes(self, tokens: int, rows: int = 1, chunk: int = 0) -> int:
        return rows * -(-tokens // 256) * 256 * 1024

    def prefill_transient_bytes(self, chunk: int, context: int) -> int:
        return chunk * 65_536

    def decode_transient_bytes(self, rows: int, context: int) -> int:
        return rows * 1024


def limits(soft: int, hard: int) -> MemoryLimits:
    return MemoryLimits(soft * MIB, hard * MIB, "max_memory", hard_binding="ram")


WISH = Wish("chat", 100 * MIB, Costs(), context_tokens=1024, longest_tokens=8192)


def test_what_fits_says_what_is_left_and_which_limit_is_nearest() -> None:
    verdict = Planner(limits(200, 400)).alone(WISH)
    assert (verdict.fits, verdict.binding, verdict.hard, verdict.limit_bytes) == (True, "max_memory", False, 200 * MIB)
    assert verdict.need.kv_bytes == MIB
    assert verdict.short_bytes == verdict.need.stays_bytes - 200 * MIB
    assert "fits: 98.5 MiB are left below the soft limit 200 MiB (max_memory)" in verdict.why


def test_each_sentence_says_what_it_sums_what_stays_under_the_soft_limit_and_all_of_it_under_the_hard_one() -> None:
    other = replace(WISH, name="other")
    roomy = Planner(limits(400, 800)).together([WISH, other])
    passing = format_bytes(roomy.need.transient_bytes)
    assert roomy.why == (
        f"`chat`, `other` need 203 MiB that stay (and {passing} in passing), and fit: 197 MiB are left below the soft"
        " limit 400 MiB (max_memory)"
    )
    hard = Planner(limits(800, 400)).together([WISH])
    peak = format_bytes(hard.need.peak_bytes)
    assert hard.why.startswith(f"`chat` needs {peak}, of which {passing} in passing, and fits: ")
    tight = Planner(limits(800, 50)).together([WISH])
    assert f", of which {format_bytes(tight.need.transient_bytes)} in passing: " in tight.why
    assert tight.why.endswith(f"{format_bytes(tight.short_bytes)} more than the hard limit 50.0 MiB (ram) leaves")
    free = Planner(MemoryLimits(0, 0, "none", hard_binding="none")).together([WISH])
    assert free.why == f"`chat` needs 102 MiB that stay (and {passing} in passing); no limit is enforced"


def test_the_chunk_shrinks_before_anything_is_refused() -> None:
    verdict = Planner(limits(110, 110)).alone(WISH)
    assert verdict.fits
    assert verdict.need.chunk_tokens == 128  # 256 tokens would hold 16 MiB in passing
    assert (verdict.hard, verdict.binding) == (True, "ram")


def test_idle_models_would_go_least_recently_used_first_and_no_more_than_needed() -> None:
    neighbours = (Neighbour("old", 60 * MIB, False), Neighbour("new", 60 * MIB, False))
    planner = Planner(limits(200, 400), neighbours)
    assert planner.alone(WISH).evict == ("old",)
    assert replace(planner, limits=limits(150, 400)).alone(WISH).evict == ("old", "new")
    assert replace(planner, limits=limits(300, 400)).alone(WISH).evict == ()


def test_pinned_and_busy_models_stay_in_the_way() -> None:
    neighbours = (Neighbour("pinned", 60 * MIB, True, "pinned"), Neighbour("idle", 60 * MIB, False))
    verdict = Planner(limits(150, 400), neighbours).alone(WISH)
    assert (verdict.fits, verdict.evict, verdict.beside) == (False, (), neighbours[:1])
    assert verdict.waits_for == ()
    assert "beside 60.0 MiB of `pinned` (pinned): " in verdict.why
    assert verdict.why.endswith(" leaves")
    assert verdict.short_bytes == 60 * MIB + verdict.need.stays_bytes - 150 * MIB
    assert (verdict.max_context_tokens, verdict.max_concurrency) == (0, 0)


def test_a_busy_model_in_the_way_is_waited_for_unless_a_pinned_one_is_too() -> None:
    busy, loading = Neighbour("busy", 60 * MIB, True, "busy"), Neighbour("soon", 10 * MIB, True, "loading")
    planner = Planner(limits(150, 400), (busy, loading), parks=True)
    verdict = planner.alone(WISH)
    assert (verdict.fits, verdict.waits_for) == (False, ("busy", "soon"))
    assert "of `busy` (busy), `soon` (loading): " in verdict.why
    assert verdict.why.endswith(
        "leaves while `busy`, `soon` are busy; a request waits until they are idle, or their requests are parked for it"
    )
    alone = replace(planner, neighbours=(busy,), parks=False).alone(WISH)
    assert alone.why.endswith("leaves while `busy` is busy; a request waits until it is idle")
    pinned = Neighbour("pinned", 60 * MIB, True, "pinned")
    assert replace(planner, neighbours=(busy, pinned)).alone(WISH).waits_for == ()
    assert replace(planner, limits=limits(200, 400)).alone(WISH).waits_for == ()


def test_a_model_that_is_loaded_is_not_its_own_neighbour() -> None:
    assert Planner(limits(110, 400), (Neighbour("chat", 100 * MIB, True, "pinned"),)).alone(WISH).fits


def test_the_longest_context_and_the_most_requests_are_the_last_that_fit() -> None:
    planner = Planner(limits(105, 400))
    verdict = planner.alone(WISH)
    longest, most = verdict.max_context_tokens, verdict.max_concurrency
    assert planner.alone(replace(WISH, context_tokens=longest)).fits
    assert not planner.alone(replace(WISH, context_tokens=longest + 1)).fits
    assert planner.alone(replace(WISH, rows=most)).fits
    assert not planner.alone(replace(WISH, rows=most + 1)).fits


def test_the_longest_context_is_never_more_than_the_models_own() -> None:
    assert Planner(limits(4000, 8000)).alone(WISH).max_context_tokens == 8192


def test_models_together_add_what_stays_and_take_the_largest_step() -> None:
    planner, other = Planner(limits(250, 400)), replace(WISH, name="other", weights_bytes=120 * MIB)
    together = planner.together([WISH, other])
    assert together.fits
    assert together.need.weights_bytes == 220 * MIB
    assert together.need.transient_bytes == planner.alone(WISH).need.transient_bytes
    assert not replace(planner, limits=limits(200, 400)).together([WISH, other]).fits
    assert all(replace(planner, limits=limits(200, 400)).alone(wish).fits for wish in (WISH, other))


def test_without_limits_everything_fits() -> None:
    verdict = Planner(MemoryLimits(0, 0, "max_memory")).alone(WISH)
    assert (verdict.fits, verdict.binding, verdict.max_context_tokens) == (True, "none", 8192)


@given(st.integers(90, 300), st.integers(0, 100), st.integers(1, 20_000), st.integers(1, 32))
def test_what_fits_also_fits_below_a_higher_limit(soft: int, more: int, context: int, rows: int) -> None:
    wish = replace(WISH, context_tokens=context, rows=rows)
    if Planner(limits(soft, soft + 20)).together([wish]).fits:
        assert Planner(limits(soft + more, soft + more + 20)).together([wish]).fits
