"""The ledger: the sum of what has been promised, in bytes, model by model; pure data, no clock, no MLX.

What stays: weights count in full from before the first byte is read until the last one is back. KV caches are reserved
by decode batch: every admitted request is a row of it, prefilling or not, and every row is padded to the longest plus a
block to grow into; so a request costs the difference it makes, and joining the batch needs nothing more.

What passes: a step holds memory that it gives back. The engine takes one step at a time, so not the sum of these
transients is promised but the largest. A step that reads several short prompts at once may hold more than that, out of
what nobody has been promised: such a grant keeps nobody out, since the plan that brings whoever takes the room brings a
smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from omlxd.core.costs import BLOCK_TOKENS, NO_COSTS, KvCosts

AHEAD_TOKENS: Final = 64
"""A batch that is this close to the end of its reservation asks for the next block, so that it need not stop there."""
SLACK_TOKENS: Final = BLOCK_TOKENS - 1
"""How far behind its last token a cache may end."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one model, or all of them, have been promised, in bytes.

    Attributes:
        weights_bytes: of loaded, loading and unloading models.
        kv_bytes: of the decode batches with all their rows.
        prefill_bytes: what prompts hold beyond their row while they are being prefilled.
        transient_bytes: the largest that one step holds in passing.
    """

    weights_bytes: int = 0
    kv_bytes: int = 0
    prefill_bytes: int = 0
    transient_bytes: int = 0

    @property
    def committed_bytes(self) -> int:
        """What stays."""
        return self.weights_bytes + self.kv_bytes + self.prefill_bytes


@dataclass(frozen=True, slots=True)
class Difference:
    """What one more request or block would add to what stays, and the largest transient there would be then."""

    stays_bytes: int
    transient_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One admitted request: its length so far, and its prefill while that lasts."""

    tokens: int
    prefill_bytes: int = 0
    prefill_transient_bytes: int = 0
    unread: bool = False


@dataclass(slots=True)
class Account:
    """One model's promises, and what the rows come to: there may be very many that wait in the engine for a place.

    Attributes:
        longest_tokens, prefill_bytes, prefill_transient_bytes: of all rows: the longest, the sum, the largest.
        unread: how many rows have a prompt that is not read yet.
        group_transient_bytes: what a step may hold in passing that reads several of those at once.
        share: what the promises add up to, until they change.
    """

    weights_bytes: int = 0
    costs: KvCosts = NO_COSTS
    rows: dict[str, Row] = field(default_factory=dict)
    reserved_tokens: int = 0
    longest_tokens: int = 0
    prefill_bytes: int = 0
    prefill_transient_bytes: int = 0
    unread: int = 0
    group_transient_bytes: int = 0
    share: Share | None = None

    def put(self, request: str, row: Row) -> None:
        """One more row."""
        self.rows[request] = row
        self.longest_tokens = max(self.longest_tokens, row.tokens)
        self.unread += row.unread
        self.prefill_bytes += row.prefill_bytes
        self.prefill_transient_bytes = max(self.prefill_transient_bytes, row.prefill_transient_bytes)

    def take(self, request: str) -> Row | None:
        """Without this row; None when there is none."""
        row, left = self.rows.pop(request, None), self.rows.values()
        if row is not None:
            self.unread -= row.unread
            self.prefill_bytes -= row.prefill_bytes
            if row.tokens == self.longest_tokens:
                self.longest_tokens = max((each.tokens for each in left), default=0)
            if row.prefill_transient_bytes == self.prefill_transient_bytes > 0:
                self.prefill_transient_bytes = max((each.prefill_transient_bytes for each in left), default=0)
        return row

    def fit_rows(self) -> None:
        """Reserve as far as the longest row needs it; never less than before."""
        if not self.longest_tokens:
            self.reserved_tokens = 0
        else:
            self.reserved_tokens = max(self.reserved_tokens, reserved_tokens(self.longest_tokens))

    def share_of(self, rows: int) -> Share:
        """What the promises add up to with so many rows that hold a KV cache."""
        kv_bytes = transient_bytes = 0
        if rows:
            kv_bytes = self.costs.kv_bytes(self.reserved_tokens, rows)
            decode_bytes = self.costs.decode_transient_bytes(rows, self.reserved_tokens)
            transient_bytes = max(decode_bytes, self.prefill_transient_bytes)
        return Share(self.weights_bytes, kv_bytes, self.prefill_bytes, transient_bytes)


class Ledger:
    """All promises of one pool.

    Args:
        max_batch: requests of one model that run at once; more hold no KV cache.
    """

    def __init__(self, max_batch: int = 32) -> None:
        self._max_batch = max_batch
        self._accounts: dict[str, Account] = {}

    # Weights

    def reserve_weights(self, model: str, weights_bytes: int) -> None:
        """A load begins; once more with the measured figure when it has ended well."""
        self._account(model).weights_bytes = max(0, weights_bytes)

    def release_weights(self, model: str) -> None:
        """The model's memory is back."""
        if (account := self._changing(model)) is not None:
            account.weights_bytes = 0
            self._forget_empty(model, account)

    # Requests

    def reserve(self, model: str, request: str, costs: KvCosts, tokens: int, chunk_tokens: int) -> None:
        """Admit a request with a prompt of `tokens`, to be prefilled in chunks of `chunk_tokens`."""
        account = self._account(model)
        account.costs = costs
        account.take(request)
        account.longest_tokens = max(account.longest_tokens, tokens)
        account.fit_rows()
        account.put(request, _prefilling(account, tokens, chunk_tokens))

    def prefilled(self, model: str, request: str) -> None:
        """The request decodes; what its prefill held in passing is free."""
        account = self._changing(model)
        if account is not None and (row := account.take(request)) is not None:
            account.put(request, Row(row.tokens))

    def grow(self, model: str, request: str, tokens: int) -> bool:
        """The request has become `tokens` longer; whether its batch is near the end of what is reserved for it.

        Nothing more is promised by that, so what the promises add up to stays: this is called for every token.
        """
        account = self._accounts.get(model)
        if account is None or (row := account.rows.get(request)) is None:
            return False
        grown = row.tokens + tokens
        account.rows[request] = Row(grown, row.prefill_bytes, row.prefill_transient_bytes, row.unread)
        account.longest_tokens = max(account.longest_tokens, grown)
        return grown + AHEAD_TOKENS > usable_tokens(account.reserved_tokens)

    def extend(self, model: str) -> None:
        """Reserve the next block of the model's batch, as far as its longest request needs one."""
        if (account := self._changing(model)) is not None:
            account.fit_rows()

    def release(self, model: str, request: str) -> None:
        """The request's memory is back; does nothing when it holds none."""
        account = self._changing(model)
        if account is None or account.take(request) is None:
            return
        account.reserved_tokens = 0
        account.fit_rows()
        self._forget_empty(model, account)

    def recost(self, model: str, costs: KvCosts) -> None:
        """Better figures are known: what is reserved for the model's requests counts by them from now on."""
        if (account := self._changing(model)) is not None:
            account.costs = costs

    # Short prompts that are read together

    def groups(self) -> tuple[str, ...]:
        """The models that have several prompts to read, and whose steps can be predicted."""
        return tuple(model for model, each in self._accounts.items() if each.unread > 1 and each.costs.certain)

    def group_transient_bytes(self, model: str, tokens: int) -> int:
        """What a step holds in passing that reads prompts of the model at once, of so many tokens with padding."""
        account = self._accounts.get(model)
        return 0 if account is None else account.costs.group_transient_bytes(tokens)

    def grant_groups(self, tokens: Mapping[str, int]) -> None:
        """What such steps may read, by model; instead of all that was granted before."""
        for model, account in self._accounts.items():
            account.group_transient_bytes = self.group_transient_bytes(model, tokens.get(model, 0))

    # What it adds up to

    @property
    def committed_bytes(self) -> int:
        """What stays, of all models."""
        return sum(self._share(account).committed_bytes for account in self._accounts.values())

    @property
    def transient_bytes(self) -> int:
        """The largest that one step holds in passing, of those that were promised: they are taken one at a time."""
        return max((self._share(account).transient_bytes for account in self._accounts.values()), default=0)

    @property
    def passing_bytes(self) -> int:
        """The same with the steps that read several prompts at once, while there are any."""
        groups = (each.group_transient_bytes for each in self._accounts.values() if each.unread > 1)
        return max(self.transient_bytes, *groups, 0)

    def committed_by_model(self) -> dict[str, int]:
        """What stays, of each model that has been promised anything."""
        return {model: self._share(account).committed_bytes for model, account in self._accounts.items()}

    def share(self, model: str) -> Share:
        """What the model has been promised."""
        account = self._accounts.get(model)
        return Share() if account is None else self._share(account)

    def total(self) -> Share:
        """What all have been promised together, by kind."""
        shares = [self._share(account) for account in self._accounts.values()]
        return Share(
            sum(share.weights_bytes for share in shares),
            sum(share.kv_bytes for share in shares),
            sum(share.prefill_bytes for share in shares),
            max((share.transient_bytes for share in shares), default=0),
        )

    def requests(self, model: str) -> int:
        """How many requests of the model have been admitted and not released."""
        return len(account.rows) if (account := self._accounts.get(model)) is not None else 0

    def running(self) -> frozenset[str]:
        """The models with admitted requests."""
        return frozenset(model for model, account in self._accounts.items() if account.rows)

    def granted_tokens(self) -> dict[str, int]:
        """By model with requests: how long they may grow on what is reserved; without those whose cost is not known."""
        return {
            model: usable_tokens(account.reserved_tokens)
            for model, account in self._accounts.items()
            if account.rows and self._share(account).kv_bytes
        }

    def if_admitted(self, model: str, costs: KvCosts, tokens: int, chunk_tokens: int) -> Difference:
        """The difference that a prompt of `tokens` would make; nothing is reserved."""
        now = self._accounts.get(model) or Account()
        then = replace(now, costs=costs, longest_tokens=max(now.longest_tokens, tokens), share=None)
        then.fit_rows()
        row = _prefilling(then, tokens, chunk_tokens)
        then.prefill_bytes += row.prefill_bytes
        then.prefill_transient_bytes = max(then.prefill_transient_bytes, row.prefill_transient_bytes)
        return self._difference(now, then.share_of(min(len(now.rows) + 1, self._max_batch)))

    def if_extended(self, model: str) -> Difference:
        """The difference that the next block of the model's batch would make; nothing is reserved."""
        now = self._accounts.get(model) or Account()
        then = replace(now, share=None)
        then.fit_rows()
        return self._difference(now, self._share(then))

    def frees_bytes(self, model: str) -> dict[str, int]:
        """By request, what the promises to the model would shrink by if that one alone left; nothing is released."""
        now = self._accounts.get(model)
        if now is None or not now.rows:
            return {}
        lengths = sorted((row.tokens for row in now.rows.values()), reverse=True)
        kv_bytes, left = self._share(now).kv_bytes, min(len(lengths) - 1, self._max_batch)

        def left_bytes(longest: int) -> int:
            return now.costs.kv_bytes(reserved_tokens(longest), left) if left else 0

        without_a_short, without_the_longest = left_bytes(lengths[0]), left_bytes(lengths[min(1, left)])
        return {
            name: kv_bytes + row.prefill_bytes - (without_the_longest if row.tokens == lengths[0] else without_a_short)
            for name, row in now.rows.items()
        }

    def _difference(self, now: Account, then: Share) -> Difference:
        transient_bytes = max(self.transient_bytes, then.transient_bytes)
        return Difference(then.committed_bytes - self._share(now).committed_bytes, transient_bytes)

    def _account(self, model: str) -> Account:
        self._accounts.setdefault(model, Account()).share = None
        return self._accounts[model]

    def _changing(self, model: str) -> Account | None:
        """The model's account, for a change of its promises."""
        account = self._accounts.get(model)
        if account is not None:
            account.share = None
        return account

    def _forget_empty(self, model: str, account: Account) -> None:
        if not account.rows and not account.weights_bytes:
            del self._accounts[model]

    def _share(self, account: Account) -> Share:
        if account.share is None:
            account.share = account.share_of(min(len(account.rows), self._max_batch))
        return account.share


def reserved_tokens(longest: int) -> int:
    """What is reserved for a batch whose longest row has `longest` tokens: whole blocks, one of them to grow into."""
    reserved = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS + BLOCK_TOKENS
    if usable_tokens(reserved) < longest + AHEAD_TOKENS:
        reserved += BLOCK_TOKENS
    return reserved


def usable_tokens(reserved: int) -> int:
    """How long a row may become on a reservation.

    A cache grows by a block from wherever its row ends at that moment, alone as in a batch, which is cut to its longest
    row when rows join or leave: its buffers may end up to a block less one token behind the last row's end.
    """
    return reserved - SLACK_TOKENS


def _prefilling(account: Account, tokens: int, chunk_tokens: int) -> Row:
    """A row whose prompt is still to be prefilled, on a cache of its own that a window may not have cut yet."""
    costs, chunk = account.costs, min(chunk_tokens, tokens)
    slack_end = min(tokens + SLACK_TOKENS, account.reserved_tokens)
    held_bytes = costs.kv_bytes(tokens, 1, chunk) + costs.kv_bytes(slack_end, 1) - costs.kv_bytes(tokens, 1)
    row_bytes = costs.kv_bytes(account.reserved_tokens, 1)
    return Row(tokens, max(0, held_bytes - row_bytes), costs.prefill_transient_bytes(chunk, tokens), unread=True)
