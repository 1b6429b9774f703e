"""Loads one model in slices: each can be seen, stopped and refused before the next one takes memory.

A load is lazy first (the files are mapped, nothing is read), then materialised slice by slice. Whatever ends it early
leaves nothing behind: no array, and no traceback that pins the frames that hold them.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlxd.core.errors import DoesNotFit, EngineFailed, LoadFailed, OmlxError
from omlxd.engine import mlxlm
from omlxd.engine.disk import disk_read_bytes, disk_read_since
from omlxd.engine.gauges import Gauges, trim_heap
from omlxd.engine.mishaps import is_out_of_files, is_out_of_memory, no_files_left
from omlxd.engine.orders import MIB, EngineLimits, LoadOrder
from omlxd.engine.text import ChatCodec

if TYPE_CHECKING:
    import mlx.core as mx

# Not `omlxd check`: the daemon has looked at all that it looks at before it ordered the load.
_AGAIN = "download the model again, or choose another conversion of it"


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
        warm: codecs of models that were loaded before, by folder; reused while the tokenizer's files are the same.
        now_s: when it was ordered.

    Attributes:
        moved_s: when it took its last step, kept by who lets it.
    """

    def __init__(
        self, order: LoadOrder, gauges: Gauges, warm: dict[str, tuple[object, ChatCodec]], now_s: float
    ) -> None:
        self.order = order
        self.moved_s = now_s
        self.done_bytes = 0
        self.total_bytes = order.weights_bytes
        self._gauges, self._warm = gauges, warm
        self._started_s, self._read_bytes = 0.0, 0
        self._module: Any = None
        self.codec: ChatCodec | None = None
        self._arrays: list[mx.array] | None = None
        self._files: object = None

    def step(self, limits: EngineLimits, slice_bytes: int) -> LoadedModel | None:
        """Take the next slice (the first call opens the files); the model once all of it is in memory.

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
            if group := next_slice(self._arrays, slice_bytes):
                size = sum(array.nbytes for array in group)
                self._refuse_beyond_hard(size, limits)
                mx.eval(group)
                self.done_bytes += size
                return None
            assert self.codec is not None
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
        self.codec = self._read_codec(folder, config)
        arrays = mlxlm.every_array(self._module)
        self.total_bytes = sum(array.nbytes for array in arrays)
        arrays.reverse()
        self._arrays = arrays

    def _read_codec(self, folder: Path, config: dict[str, Any]) -> ChatCodec:
        stamp = _stamp(folder)
        known = self._warm.get(self.order.path)
        if known and known[0] == (stamp, self.order.max_context):
            return known[1]
        before = self._gauges.backend.footprint_bytes()
        codec = _make_codec(folder, config, self.order, stamp)
        self._gauges.grow_base(self._gauges.backend.footprint_bytes() - before)
        codec.grammars.grown = self._gauges.grow_base
        self._warm[self.order.path] = ((stamp, self.order.max_context), codec)
        return codec

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


def read_codec(order: LoadOrder) -> ChatCodec:
    """The tokenizer of a model folder without the model; takes up to seconds, so call it in a thread of its own.

    Raises:
        LoadFailed: the folder has no config or no tokenizer that can be used.
    """
    folder = Path(order.path)
    mlxlm.import_libraries()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _make_codec(folder, config, order, _stamp(folder))
    except OmlxError:
        raise
    except Exception as error:
        raise explain(error, order) from None


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    return tuple(
        (path.name, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.iterdir())
        if path.suffix in {".json", ".jinja", ".model", ".tiktoken", ".txt"}
    )


def _weights_stamp(folder: Path) -> object:
    """Differs when a file of weights was written to, replaced, added or removed."""
    try:
        found = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    except OSError:
        return None
    return [(name, seen.st_ino, seen.st_size, seen.st_mtime_ns) for name, seen in found]


def _make_codec(
    folder: Path, config: dict[str, Any], order: LoadOrder, stamp: tuple[tuple[str, int, int], ...]
) -> ChatCodec:
    try:
        tokenizer = mlxlm.load_tokenizer(folder, config)
        codec = ChatCodec(tokenizer, _vocab_size(config, tokenizer), _context_length(config, order.max_context))
        codec.encode_text("warm up")  # also proves that it works
    except Exception as error:  # tokenizers raise their own kinds, down to plain Exception
        if is_out_of_files(error):
            raise no_files_left(order.model) from None
        if not all((folder / name).is_file() for name, *_ in stamp):
            raise _disappeared(order) from None  # without the files mlx-lm takes the path for a hub name
        raise LoadFailed(
            f"cannot load `{order.model}`: the tokenizer cannot be used: {_one_line(error)}",
            hint="download the tokenizer files of the model again",
            details={"kind": "bad_tokenizer", "path": order.path},
        ) from None
    return codec


def next_slice(arrays: list[mx.array], slice_bytes: int) -> list[mx.array]:
    """Whole tensors of about `slice_bytes`, at least one, taken off the end of `arrays`; empty when none is left."""
    group: list[mx.array] = []
    size = 0
    while arrays and (not group or size + arrays[-1].nbytes <= slice_bytes):
        group.append(arrays.pop())
        size += group[-1].nbytes
    return group


def _vocab_size(config: dict[str, Any], tokenizer: Any) -> int:
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else len(tokenizer)


def _context_length(config: dict[str, Any], max_context: int | None) -> int | None:
    text = config.get("text_config") or {}
    keys = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "max_sequence_length")
    known = [int(source[key]) for source in (config, text) for key in keys if source.get(key)]
    lengths = [*known[:1], *([max_context] if max_context else [])]
    return min(lengths) if lengths else None


def explain(error: BaseException, order: LoadOrder) -> OmlxError:
    """What went wrong with a folder, in one sentence, from the exceptions mlx-lm is known to raise."""
    text = _one_line(error)
    if is_out_of_files(error):
        return no_files_left(order.model)
    if not Path(order.path).is_dir():
        return _disappeared(order)
    if isinstance(error, ImportError):
        return EngineFailed(
            f"cannot load `{order.model}`: {text}", hint="install what is missing, then `omlxd restart`"
        )
    if is_out_of_memory(error):
        return DoesNotFit(f"the device ran out of memory while loading `{order.model}`", hint="lower `max_memory`")
    kind, what, hint = _explain_folder(error, text)
    return LoadFailed(f"cannot load `{order.model}`: {what}", hint=hint, details={"kind": kind, "path": order.path})


def _disappeared(order: LoadOrder) -> LoadFailed:
    return LoadFailed(
        f"the files of `{order.model}` disappeared while it was loaded",
        hint=f"put the model back at `{order.path}`, then load it again",
        details={"kind": "missing_folder", "path": order.path},
    )


def _explain_folder(error: BaseException, text: str) -> tuple[str, str, str]:
    """Kind, sentence and next step for an error that the folder's files caused."""
    if isinstance(error, FileNotFoundError):
        return "missing_file", text, _AGAIN
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "bad_config", f"`config.json` cannot be read: {text}", _AGAIN
    if isinstance(error, ValueError):
        return _explain_value_error(text)
    if isinstance(error, RuntimeError):
        again = "the file may be truncated or damaged: download it again"
        return "bad_weights", f"the weights cannot be read: {text}", again
    if isinstance(error, OSError):
        return "unreadable", text, "check the permissions and the disk"
    return "bad_config", f"`config.json` lacks a field or has a wrong one: {text}", _AGAIN


def _explain_value_error(text: str) -> tuple[str, str, str]:
    if "Model type" in text and "not supported" in text:
        model_type = text.partition("Model type ")[2].partition(" not supported")[0]
        what = f"this version of mlx-lm does not support the model type `{model_type}`"
        return "unsupported_model", what, "upgrade mlx-lm, or choose another model"
    if "parameter" in text:
        return "weights_mismatch", f"the weights do not match `config.json` (a shard may be missing): {text}", _AGAIN
    if "custom module" in text:
        what = "the model wants to run code from its folder, which omlxd never does"
        return "remote_code", what, "choose a conversion of the model that needs no code of its own"
    return "bad_model", text, _AGAIN


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    plain = isinstance(error, ValueError | RuntimeError | OSError) and text
    return text if plain else f"{type(error).__name__}: {text}"
