"""How many tokens one step may read of several short prompts at once: only what the hard limit leaves unpromised."""

from __future__ import annotations

from typing import Final

from omlxd.core.admission import taken
from omlxd.core.ledger import Ledger
from omlxd.core.prefix_budget import MARGIN_SHARE
from omlxd.core.snapshot import Limits, Snapshot

SIZES: Final = (1024, 512, 256, 128, 64)
"""Tokens with padding, the largest first; reading more at once wins little."""


def group_tokens(snapshot: Snapshot, limits: Limits, ledger: Ledger, prefix_cache_bytes: int) -> dict[str, int]:
    """By model with several prompts to read, the tokens of a step that reads some of them together.

    What such a step holds in passing is within what any step was promised, or in room that nobody else may take before
    the next plan; models for which there is none are left out.

    Args:
        prefix_cache_bytes: what prefix caches may hold meanwhile.
    """
    if not (names := ledger.groups()) or limits.system_short(snapshot.reading):
        return {}
    left_bytes = limits.hard_bytes - limits.hard_bytes // MARGIN_SHARE - prefix_cache_bytes
    left_bytes = max(left_bytes - taken(snapshot, limits, ledger), ledger.transient_bytes)
    sizes = {}
    for model in names:
        for size in SIZES:
            if limits.hard_bytes <= 0 or ledger.group_transient_bytes(model, size) <= left_bytes:
                sizes[model] = size
                break
    return sizes
