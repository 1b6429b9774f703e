"""Reads the tokenizer of a model's folder, unless the same files, or others that say the same, were read before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeAlias

from omlxd.core.errors import LoadFailed, OmlxError
from omlxd.engine import mlxlm
from omlxd.engine.gauges import Gauges
from omlxd.engine.load_errors import disappeared, explain, one_line
from omlxd.engine.mishaps import is_out_of_files, no_files_left
from omlxd.engine.orders import LoadOrder
from omlxd.engine.text import ChatCodec
from omlxd.engine.warm_codecs import WarmCodecs

Stamp: TypeAlias = tuple[tuple[str, int, int], ...]
"""Of each file beside the weights its name, when it was written, and its size."""
_NOT_THE_TOKENIZERS = ("config.json", "generation_config.json", "model.safetensors.index.json")


def read_codec(order: LoadOrder, codecs: WarmCodecs, gauges: Gauges) -> ChatCodec:
    """The tokenizer of a model folder without the model; takes up to seconds, so call it in a thread of its own.

    Args:
        order: the model and its folder.
        codecs: what is kept already, and keeps this one.
        gauges: tell what it adds to the process.

    Raises:
        LoadFailed: the folder has no config or no tokenizer that can be used.
    """
    folder = Path(order.path)
    mlxlm.import_libraries()
    try:
        config, stamp = mlxlm.load_config(folder), stamp_of(folder)
        return codecs.known(order, stamp) or new_codec(folder, config, order, stamp, codecs, gauges)
    except OmlxError:
        raise
    except Exception as error:
        raise explain(error, order) from None


def stamp_of(folder: Path) -> Stamp:
    """The state of the files that a tokenizer is made of, and of their neighbours."""
    return tuple(
        (path.name, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.iterdir())
        if path.suffix in {".json", ".jinja", ".model", ".tiktoken", ".txt"}
    )


def new_codec(
    folder: Path, config: dict[str, Any], order: LoadOrder, stamp: Stamp, codecs: WarmCodecs, gauges: Gauges
) -> ChatCodec:
    """The tokenizer of files that have not been read in this state; one that is kept, if they say the same as its.

    Args:
        folder, config: the model's.
        order: names the model.
        stamp: the state of its files.
        codecs, gauges: see `read_codec`.

    Raises:
        LoadFailed: no tokenizer can be made of them.
        OSError: a file has disappeared.
    """
    content = _content(folder, config, order)
    if (alike := codecs.alike(order, stamp, content)) is not None:
        return alike
    before_bytes = gauges.beside_mlx_bytes()
    codec = _make_codec(folder, config, order, stamp)
    codecs.keep(order, stamp, content, codec, gauges.beside_mlx_bytes() - before_bytes)
    return codec


def _content(folder: Path, config: dict[str, Any], order: LoadOrder) -> object:
    """All that a tokenizer is made of: its files to the byte, and what it takes from the model's config."""
    digest = hashlib.blake2b()
    for name, *_ in stamp_of(folder):
        if name not in _NOT_THE_TOKENIZERS:
            content = (folder / name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
    text = config.get("text_config") or {}
    sizes = (config.get("vocab_size"), text.get("vocab_size"), _context_length(config, order.max_context))
    return digest.digest(), config.get("model_type"), repr(config.get("eos_token_id")), sizes


def _make_codec(folder: Path, config: dict[str, Any], order: LoadOrder, stamp: Stamp) -> ChatCodec:
    try:
        tokenizer = mlxlm.load_tokenizer(folder, config)
        codec = ChatCodec(tokenizer, _vocab_size(config, tokenizer), _context_length(config, order.max_context))
        codec.encode_text("warm up")  # also proves that it works
    except Exception as error:  # tokenizers raise their own kinds, down to plain Exception
        if is_out_of_files(error):
            raise no_files_left(order.model) from None
        if not all((folder / name).is_file() for name, *_ in stamp):
            raise disappeared(order) from None  # without the files mlx-lm takes the path for a hub name
        raise LoadFailed(
            f"cannot load `{order.model}`: the tokenizer cannot be used: {one_line(error)}",
            hint="download the tokenizer files of the model again",
            details={"kind": "bad_tokenizer", "path": order.path},
        ) from None
    return codec


def _vocab_size(config: dict[str, Any], tokenizer: Any) -> int:
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else len(tokenizer)


def _context_length(config: dict[str, Any], max_context: int | None) -> int | None:
    text = config.get("text_config") or {}
    keys = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "max_sequence_length")
    known = [int(source[key]) for source in (config, text) for key in keys if source.get(key)]
    lengths = [*known[:1], *([max_context] if max_context else [])]
    return min(lengths) if lengths else None
