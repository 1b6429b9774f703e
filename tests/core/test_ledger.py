"""The ledger adds up, whatever is reserved, grown, settled and released in whatever order."""

from __future__ import annotations

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from omlxd.core.admission import AdmissionKind, Ask, decide_block, decide_request
from omlxd.core.ledger import AHEAD_TOKENS, Ledger, Share, reserved_tokens, usable_tokens
from omlxd.core.memory import MemoryReading
from omlxd.core.snapshot import EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from tests.fakes.costs import FakeCosts

KIB = 1024
COSTS = FakeCosts(token_bytes=KIB)


def test_a_lone_row_has_its_prompt_and_a_block_to_grow_into() -> None:
    ledger = Ledger()
    ledger.reserve("m", "a", COSTS, 300, 256)
    assert ledger.granted_tokens() == {"m": 768 - 255}
    assert ledger.committed_bytes == 768 * KIB


def test_a_short_request_that_joins_a_long_one_pays_a_padded_row() -> None:
    ledger = Ledger()
    ledger.reserve("m", "long", COSTS, 2000, 256)
    alone_bytes = ledger.committed_bytes
    difference = ledger.if_admitted("m", COSTS, 50, 256)
    ledger.reserve("m", "short", COSTS, 50, 256)
    assert difference.stays_bytes == ledger.committed_bytes - alone_bytes
    assert difference.stays_bytes >= 2048 * KIB


def test_no_row_needs_more_than_is_reserved_wherever_its_buffers_end() -> None:
    for longest in range(1, 1200):
        reserved = reserved_tokens(longest)
        usable = usable_tokens(reserved)
        assert usable >= longest + AHEAD_TOKENS
        assert usable + 255 <= reserved  # a buffer that was begun just before the last usable token


def test_growing_asks_for_the_next_block_before_the_last_one_is_used_up() -> None:
    ledger = Ledger()
    ledger.reserve("m", "a", COSTS, 256, 256)
    assert ledger.granted_tokens() == {"m": 513}
    assert not ledger.grow("m", "a", 193)
    assert ledger.grow("m", "a", 1)
    assert ledger.if_extended("m").stays_bytes == 256 * KIB
    ledger.extend("m")
    assert ledger.granted_tokens() == {"m": 769}
    assert not ledger.grow("m", "a", 1)


def test_the_transient_is_the_largest_of_the_steps_and_a_prefill_ends_with_its_prompt() -> None:
    costs = FakeCosts(token_bytes=KIB, chunk_token_bytes=100, decode_bytes=50)
    ledger = Ledger()
    ledger.reserve("m", "a", costs, 300, 256)
    ledger.reserve("n", "b", costs, 300, 16)
    assert ledger.transient_bytes == 256 * 100
    ledger.prefilled("m", "a")
    assert ledger.transient_bytes == 16 * 100
    ledger.prefilled("n", "b")
    assert ledger.transient_bytes == 50


def test_rows_beyond_the_largest_batch_hold_no_cache() -> None:
    ledger = Ledger(max_batch=2)
    for request in ("a", "b"):
        ledger.reserve("m", request, COSTS, 100, 256)
    assert ledger.if_admitted("m", COSTS, 100, 256).stays_bytes == 0


def test_the_longest_of_a_batch_frees_its_row_and_the_padding_of_the_others() -> None:
    ledger = Ledger()
    for request, tokens in (("long", 2000), ("short", 50), ("other", 300)):
        ledger.reserve("m", request, COSTS, tokens, 256)
    row = reserved_tokens(2000) * KIB
    assert ledger.frees_bytes("m")["short"] == row
    assert ledger.frees_bytes("m")["long"] == 3 * row - 2 * reserved_tokens(300) * KIB
    assert ledger.frees_bytes("nobody") == {}


def test_better_figures_count_at_once() -> None:
    ledger = Ledger()
    ledger.reserve("m", "a", COSTS, 300, 256)
    ledger.recost("m", FakeCosts(token_bytes=2 * KIB))
    assert ledger.committed_bytes == 2 * 768 * KIB


MODELS = st.sampled_from(["m", "n", "o"])
LIMITS = Limits(soft_bytes=20_000 * KIB, hard_bytes=21_000 * KIB)


class LedgerMachine(RuleBasedStateMachine):
    """Loads, requests and growth that are admitted first, as the pool does it."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(max_batch=4)
        self.weights: dict[str, int] = {}
        self.rows: dict[str, dict[str, int]] = {}
        self.count = 0

    def snapshot(self) -> Snapshot:
        entries = tuple(EntrySnapshot(name, EntryState.LOADED, weights_bytes=w) for name, w in self.weights.items())
        return Snapshot(0.0, MemoryReading(active_bytes=sum(self.weights.values())), entries)

    @rule(model=MODELS, kib=st.integers(0, 8000))
    def load(self, model: str, kib: int) -> None:
        if model not in self.weights and self.ledger.committed_bytes + kib * KIB <= LIMITS.soft_bytes:
            self.weights[model] = kib * KIB
            self.ledger.reserve_weights(model, kib * KIB)

    @rule(model=MODELS, kib=st.integers(0, 4000))
    def settle(self, model: str, kib: int) -> None:
        if model in self.weights and kib * KIB <= self.weights[model]:
            self.weights[model] = kib * KIB
            self.ledger.reserve_weights(model, kib * KIB)

    @rule(target=requests, model=MODELS, tokens=st.integers(1, 3000), token_bytes=st.sampled_from([0, 300, KIB]))
    def admit(self, model: str, tokens: int, token_bytes: int) -> object:
        costs = FakeCosts(token_bytes=KIB, chunk_token_bytes=token_bytes, decode_bytes=500)
        if model not in self.weights:
            return multiple()
        ask = Ask(model, tokens, 256, costs)
        admission = decide_request(self.snapshot(), LIMITS, self.ledger, ask)
        if admission.kind is not AdmissionKind.ADMIT:
            return multiple()
        self.count += 1
        request = f"r{self.count}"
        self.ledger.reserve(model, request, costs, tokens, admission.chunk_tokens)
        self.rows.setdefault(model, {})[request] = tokens
        return (model, request)

    @rule(request=requests)
    def prefill_ends(self, request: tuple[str, str]) -> None:
        self.ledger.prefilled(*request)

    @rule(request=requests, tokens=st.integers(1, 64))
    def decode(self, request: tuple[str, str], tokens: int) -> None:
        model, name = request
        room = self.ledger.granted_tokens().get(model, 0) - max(self.rows[model].values(), default=0)
        if name not in self.rows[model] or tokens > room:
            return
        self.rows[model][name] += tokens
        before = self.ledger.committed_bytes
        if self.ledger.grow(model, name, tokens):
            kind = decide_block(self.snapshot(), LIMITS, self.ledger, model).kind
            promised = self.ledger.if_extended(model).stays_bytes
            if kind is AdmissionKind.ADMIT:
                self.ledger.extend(model)
                assert self.ledger.committed_bytes == before + promised

    @rule(request=consumes(requests))
    def end(self, request: tuple[str, str]) -> None:
        model, name = request
        self.rows[model].pop(name, None)
        frees_bytes, before = self.ledger.frees_bytes(model).get(name, 0), self.ledger.committed_bytes
        self.ledger.release(model, name)
        assert self.ledger.committed_bytes == before - frees_bytes
        self.ledger.release(model, name)  # an end may be told twice

    @rule(model=MODELS)
    def unload(self, model: str) -> None:
        if not self.rows.get(model) and self.weights.pop(model, None) is not None:
            self.ledger.release_weights(model)

    @invariant()
    def it_adds_up_and_keeps_the_limits(self) -> None:
        total, shares = self.ledger.total(), [self.ledger.share(model) for model in ("m", "n", "o")]
        assert self.ledger.committed_bytes == total.committed_bytes == sum(each.committed_bytes for each in shares)
        assert self.ledger.transient_bytes == max(each.transient_bytes for each in shares)
        for share in shares:
            assert min(share.weights_bytes, share.kv_bytes, share.prefill_bytes, share.transient_bytes) >= 0
        assert total.weights_bytes == sum(self.weights.values())
        assert total.committed_bytes <= LIMITS.soft_bytes
        assert total.committed_bytes + total.transient_bytes <= LIMITS.hard_bytes

    @invariant()
    def what_it_remembers_is_what_it_would_work_out(self) -> None:
        total, afresh = self.ledger.total(), deepcopy(self.ledger)
        for account in afresh._accounts.values():
            rows = list(account.rows.values())
            assert account.longest_tokens == max((row.tokens for row in rows), default=0)
            assert account.unread == sum(row.unread for row in rows)
            account.prefill_bytes = sum(row.prefill_bytes for row in rows)
            account.prefill_transient_bytes = max((row.prefill_transient_bytes for row in rows), default=0)
            account.share = None
        assert total == afresh.total()

    @invariant()
    def every_row_is_covered(self) -> None:
        granted = self.ledger.granted_tokens()
        for model, rows in self.rows.items():
            assert self.ledger.requests(model) == len(rows)
            if rows:
                assert max(rows.values()) <= granted[model]
                needed_bytes = min(len(rows), 4) * max(rows.values()) * KIB
                assert self.ledger.share(model).kv_bytes >= needed_bytes

    def teardown(self) -> None:
        for model, rows in self.rows.items():
            for name in rows:
                self.ledger.release(model, name)
        for model in self.weights:
            self.ledger.release_weights(model)
        assert self.ledger.total() == Share()
        assert self.ledger.running() == frozenset()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
