"""Loads one model in slices: each can be seen, stopped and refused before the next one takes memory.

A load is lazy first (the files are mapped, nothing is read), then materialised slice by slice. Whatever ends it early
leaves nothing behind: no array, and no traceback that pins the frames that hold them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlxd.core.errors import DoesNotFit, LoadFailed, OmlxError
from omlxd.engine import mlxlm
from omlxd.engine.codec_reading import Stamp, new_codec, stamp_of
from omlxd.engine.disk import disk_read_bytes, disk_read_since
from omlxd.engine.gauges import Gauges
from omlxd.engine.glibc import trim_heap
from omlxd.engine.load_errors import explain
from omlxd.engine.orders import MIB, EngineLimits, LoadOrder
from omlxd.engine.text import ChatCodec
from omlxd.engine.warm_codecs import WarmCodecs

if TYPE_CHECKING:
    import mlx.core as mx

CODEC_WAIT_S = 0.02
"""How long a step waits for the tokenizer, where nobody else has anything to do."""


@dataclass
class LoadedModel:
    """A materialised model: mlx-lm's module, its codec, and what it takes."""

    name: str
    module: Any
    codec: ChatCodec
    weights_bytes: int
    load_s: float
    disk_bytes: int | None = None


class SlicedLoad:
    """One load in progress, advanced a slice at a time on the engine's thread.

    Args:
        order: what to load.
        gauges: read before each slice.
        codecs: tokenizers of models that were loaded before; reused while their files are the same.
        now_s: when it was ordered.

    Attributes:
        moved_s: when it took its last step, kept by who lets it.
        codec: the tokenizer, which is read on a thread of its own before the first weights; None until it is there.
    """

    def __init__(self, order: LoadOrder, gauges: Gauges, codecs: WarmCodecs, now_s: float) -> None:
        self.order = order
        self.moved_s = now_s
        self.done_bytes = 0
        self.total_bytes = order.weights_bytes
        self._gauges, self._codecs = gauges, codecs
        self._started_s, self._read_bytes = 0.0, 0
        self._module: Any = None
        self.codec: ChatCodec | None = None
        self._arrays: list[mx.array] | None = None
        self._reading: Future[ChatCodec] | None = None
        self._files: object = None

    @property
    def awaits_codec(self) -> bool:
        """Whether it can go on only once its tokenizer has been read, elsewhere."""
        return self._reading is not None and not self._reading.done()

    def step(self, limits: EngineLimits, slice_bytes: int) -> LoadedModel | None:
        """Take the next slice; the model once all of it is in memory.

        The first call opens the files; while the tokenizer is read the next ones wait for it for a moment.

        Args:
            limits: in force now.
            slice_bytes: about how much to take; at least one tensor.

        Raises:
            LoadFailed: the folder does not make a model.
            DoesNotFit: the next slice would pass the hard limit; nothing was allocated for it.
        """
        import mlx.core as mx

        try:
            if self._arrays is None:
                self._open()
                return None
            if self.codec is None:
                self._take_codec()
                return None
            if group := next_slice(self._arrays, slice_bytes):
                size = sum(array.nbytes for array in group)
                self._refuse_beyond_hard(size, limits)
                mx.eval(group)
                self.done_bytes += size
                return None
            self._refuse_changed_files()
            load_s, disk_bytes = time.perf_counter() - self._started_s, disk_read_since(self._read_bytes)
            return LoadedModel(self.order.model, self._module, self.codec, self.done_bytes, load_s, disk_bytes)
        except OmlxError:
            raise
        except Exception as error:
            raise explain(error, self.order) from None

    def abandon(self) -> None:
        """Give back what was taken so far."""
        arrays, self._module, self._arrays, self.codec = self._arrays or [], None, None, None
        self._reading = None
        mlxlm.free_one_by_one(arrays)
        mlxlm.release_memory()
        trim_heap()

    def _open(self) -> None:
        folder = Path(self.order.path)
        if not folder.is_dir():  # mlx-lm would take it for a hub name and ask the network
            raise LoadFailed(
                f"cannot load `{self.order.model}`: there is no folder `{folder}`",
                hint="correct `path` in the manifest, or download the model there",
                details={"kind": "missing_folder", "path": self.order.path},
            )
        self._started_s, self._read_bytes = time.perf_counter(), disk_read_bytes()  # not with MLX's own import
        self._files = _weights_stamp(folder)
        self._module, config = mlxlm.load_lazy(folder)
        self._begin_codec(folder, config)
        arrays = mlxlm.every_array(self._module)
        self.total_bytes = sum(array.nbytes for array in arrays)
        arrays.reverse()
        self._arrays = arrays

    def _begin_codec(self, folder: Path, config: dict[str, Any]) -> None:
        """Take the tokenizer that is kept, or have it read on a thread, so that others' answers go on meanwhile."""
        stamp = stamp_of(folder)
        self.codec = self._codecs.known(self.order, stamp)
        if self.codec is None:
            self._reading = Future()
            arguments = (self._reading, folder, config, stamp)
            threading.Thread(target=self._read_codec, args=arguments, name="omlxd-codec", daemon=True).start()

    def _read_codec(self, reading: Future[ChatCodec], folder: Path, config: dict[str, Any], stamp: Stamp) -> None:
        try:
            reading.set_result(new_codec(folder, config, self.order, stamp, self._codecs, self._gauges))
        except BaseException as error:
            reading.set_exception(error)

    def _take_codec(self) -> None:
        assert self._reading is not None
        if wait([self._reading], CODEC_WAIT_S).done:
            self.codec = self._reading.result()

    def _refuse_changed_files(self) -> None:
        """Tensors are read one after the other: a file that changes meanwhile makes a model of two halves."""
        if _weights_stamp(Path(self.order.path)) != self._files:
            raise LoadFailed(
                f"the files of `{self.order.model}` changed while it was loaded",
                hint="load it again when nobody writes to them any more",
                details={"kind": "changed", "path": self.order.path},
            )

    def _refuse_beyond_hard(self, size_bytes: int, limits: EngineLimits) -> None:
        if not limits.hard_bytes:
            return
        if self._gauges.active_bytes() + self._gauges.cache_bytes() + size_bytes > limits.hard_bytes:
            mlxlm.release_memory()
        active = self._gauges.active_bytes()
        if active + size_bytes > limits.hard_bytes:
            raise DoesNotFit(
                f"loading `{self.order.model}` stopped at {self.done_bytes / MIB:.0f} MiB of "
                f"{self.total_bytes / MIB:.0f} MiB: the next {size_bytes / MIB:.0f} MiB would pass the hard limit of "
                f"{limits.hard_bytes / MIB:.0f} MiB, {active / MIB:.0f} MiB are in use",
                hint="unload a model, or raise the limit with `omlxd limit`",
                details={
                    "needed_bytes": size_bytes,
                    "active_bytes": active,
                    "hard_limit_bytes": limits.hard_bytes,
                },
            )


def _weights_stamp(folder: Path) -> object:
    """Differs when a file of weights was written to, replaced, added or removed."""
    try:
        found = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    except OSError:
        return None
    return [(name, seen.st_ino, seen.st_size, seen.st_mtime_ns) for name, seen in found]


def next_slice(arrays: list[mx.array], slice_bytes: int) -> list[mx.array]:
    """Whole tensors of about `slice_bytes`, at least one, taken off the end of `arrays`; empty when none is left."""
    group: list[mx.array] = []
    size = 0
    while arrays and (not group or size + arrays[-1].nbytes <= slice_bytes):
        group.append(arrays.pop())
        size += group[-1].nbytes
    return group
