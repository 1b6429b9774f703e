"""The tokenizers that are kept: of loaded models always, of others the ones used last, until their files change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final

from omlxd.engine.orders import LoadOrder
from omlxd.engine.text import ChatCodec

MOST_UNUSED: Final = 16
"""Tokenizers of models that are not loaded. One takes 3 to 200 MB, which the base footprint counts."""


@dataclass(slots=True)
class _Made:
    """One tokenizer, what it was made of, and what it has added to the process."""

    codec: ChatCodec
    content: object
    grown_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """The tokenizer of one model: the folder and the state of its files that it stands for."""

    path: str
    stamp: object
    max_context: int | None
    made: _Made


class WarmCodecs:
    """Tokenizers by model, used from any thread; models whose files say the same share one.

    Args:
        grow_base: told by how many bytes the process has grown for good, negative when it shrinks.
    """

    def __init__(self, grow_base: Callable[[int], None]) -> None:
        self._grow_base = grow_base
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}  # the ones used last stand last
        self._in_use: Set[str] = frozenset()

    def of_model(self, model: str) -> ChatCodec | None:
        """The tokenizer of this model, if it is kept; that is a use of it."""
        with self._lock:
            if (kept := self._kept.pop(model, None)) is None:
                return None
            self._kept[model] = kept
            return kept.made.codec

    def known(self, order: LoadOrder, stamp: object) -> ChatCodec | None:
        """What the same files made before, for whichever model; it is kept for this one too.

        Args:
            order: names the model and the folder.
            stamp: the state of the folder's files now.
        """
        wanted = (order.path, stamp, order.max_context)
        return self._found(order, stamp, lambda kept: (kept.path, kept.stamp, kept.max_context) == wanted)

    def alike(self, order: LoadOrder, stamp: object, content: object) -> ChatCodec | None:
        """What files made that said the same, in whichever folder; it is kept for this model too.

        Args:
            order: names the model and the folder.
            stamp: the state of the folder's files now.
            content: equal where nothing differs that a tokenizer is made of.
        """
        return self._found(order, stamp, lambda kept: kept.made.content == content)

    def keep(self, order: LoadOrder, stamp: object, content: object, codec: ChatCodec, grown_bytes: int) -> None:
        """A tokenizer was made, and has added so many bytes to the process."""
        made = _Made(codec, content)

        def grow(size_bytes: int) -> None:
            made.grown_bytes += max(0, size_bytes)
            self._grow_base(max(0, size_bytes))

        grow(grown_bytes)
        codec.grammars.grown = grow
        with self._lock:
            self._put(order, stamp, made)

    def use(self, models: Set[str]) -> None:
        """These models are loaded, or being loaded: their tokenizers stay whatever comes."""
        with self._lock:
            self._in_use = models
            self._drop_unused()

    def forget(self, model: str) -> None:
        """Drop what is kept for this model."""
        with self._lock:
            self._drop(model)

    def __len__(self) -> int:
        return len({id(kept.made) for kept in self._kept.values()})

    def _found(self, order: LoadOrder, stamp: object, fits: Callable[[_Kept], bool]) -> ChatCodec | None:
        with self._lock:
            kept = next((each for each in self._kept.values() if fits(each)), None)
            if kept is None:
                return None
            self._put(order, stamp, kept.made)
            return kept.made.codec

    def _put(self, order: LoadOrder, stamp: object, made: _Made) -> None:
        before = self._kept.pop(order.model, None)
        self._kept[order.model] = _Kept(order.path, stamp, order.max_context, made)
        self._give_back(before)
        self._drop_unused(but=order.model)

    def _drop_unused(self, but: str | None = None) -> None:
        unused = [model for model in self._kept if model not in self._in_use and model != but]
        for model in unused[: max(0, len(unused) + (but is not None) - MOST_UNUSED)]:
            self._drop(model)

    def _drop(self, model: str) -> None:
        self._give_back(self._kept.pop(model, None))

    def _give_back(self, kept: _Kept | None) -> None:
        """Nobody may have it any more; then it is gone from the process, too."""
        if kept is not None and all(other.made is not kept.made for other in self._kept.values()):
            self._grow_base(-kept.made.grown_bytes)
