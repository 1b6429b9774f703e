"""Invented costs of a model's requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FakeCosts:
    """Implements `KvCosts`: caches grow by 256 tokens; a chunk and a decode step hold so much in passing."""

    token_bytes: int = 1024
    chunk_token_bytes: int = 0
    decode_bytes: int = 0
    certain: bool = True

    def kv_bytes(self, tokens: int, rows: int = 1, chunk: int = 0) -> int:
        return rows * -(-tokens // 256) * 256 * self.token_bytes

    def prefill_transient_bytes(self, chunk: int, context: int) -> int:
        return chunk * self.chunk_token_bytes

    def group_transient_bytes(self, tokens: int) -> int:
        return tokens * self.chunk_token_bytes

    def decode_transient_bytes(self, rows: int, context: int) -> int:
        return rows * self.decode_bytes
