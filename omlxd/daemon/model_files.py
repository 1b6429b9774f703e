"""Reads a model folder without MLX: config, exact weight bytes, what is missing or damaged, and where a repo lies.

All that can be known about a model before memory is promised to it, from config.json and the safetensors headers.
Whatever the files hold, only an `OmlxError` comes out: Busy when the process may open no more files, and else
NotPermitted or LoadFailed; `LoadFailed.details["kind"]` is one of missing_folder,
not_a_folder, no_config, bad_config, unsupported_model, no_weights, truncated_shard, missing_shard, bad_header,
no_tokenizer, bad_tokenizer, not_downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omlxd.core.errors import LoadFailed, NotPermitted
from omlxd.core.estimate import activation_bytes, weights_bytes
from omlxd.core.manifest import ModelSettings
from omlxd.core.wording import shown
from omlxd.daemon.model_support import installed_architectures, wrong_number
from omlxd.daemon.safetensors_header import read_header
from omlxd.engine.mishaps import is_out_of_files, no_files_left

_MAX_JSON_BYTES: Final = 2**26  # the index of the largest published models has a few MB
_QUICK_JSON_BYTES: Final = 2**20  # parsed in 10 ms; ten times that would hold up every load
_SHARD = re.compile(r"model.*\.safetensors")  # what mlx-lm loads
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
_TOKENIZER_FILES: Final = frozenset(
    {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"}
    | {"sentencepiece.bpe.model", "tiktoken.model", "tekken.json"}
)
_CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)


@dataclass(frozen=True)
class ModelFiles:
    """A model folder whose files fit together.

    Attributes:
        path: the folder.
        config: the parsed config.json.
        weights_bytes: what the weights take in memory, exactly.
        model_type: the architecture that config.json names.
        context_length: tokens, or None when config.json does not say (recurrent models have no bound).
        vocab_size: tokens in the vocabulary, or None when config.json does not say.
        fingerprint: changes when a file of the folder changes.
        tensors: how many tensors the weights have.
        element_bytes: bytes of one activation element, or None when the headers do not say.
    """

    path: Path
    config: dict[str, Any]
    weights_bytes: int
    model_type: str
    context_length: int | None
    vocab_size: int | None
    fingerprint: str
    tensors: int
    element_bytes: int | None = None


def read_model_folder(path: str | Path, *, thorough: bool = False) -> ModelFiles:
    """What the folder holds.

    Args:
        path: the folder.
        thorough: also parse a large tokenizer.json (100 ms for 10 MB), of which otherwise only the start is seen.

    Raises:
        LoadFailed: it does not hold a whole model; `details["kind"]` says which part, the hint what to do.
        NotPermitted: a file may not be read.
    """
    folder = Path(path)
    try:
        names = _names_in(folder)
        config = _config(folder, names)
        headers = _headers(folder, names)
        if not any(_is_tokenizer(name) and (folder / name).is_file() for name in names):
            raise _failed(
                "no_tokenizer", folder, "has no tokenizer", "fetch tokenizer.json from where the model is from"
            )
        _require_tokenizer_objects(folder, names, thorough)
        return ModelFiles(
            path=folder,
            config=config,
            weights_bytes=weights_bytes(headers),
            model_type=config["model_type"],
            context_length=_count(config, *_CONTEXT_KEYS),
            vocab_size=_count(config, "vocab_size"),
            fingerprint=folder_fingerprint(folder),
            tensors=len({name for header in headers for name in header}),
            element_bytes=activation_bytes(headers),
        )
    except PermissionError as refused:
        raise NotPermitted(
            f"`{shown(str(refused.filename or folder))}` may not be read",
            hint="make it readable for the user who runs omlxd",
            details={"path": shown(str(folder))},
        ) from None
    except OSError as failed:
        if is_out_of_files(failed):
            raise no_files_left(folder.name) from None
        reason = (failed.strerror or "read error").lower()
        raise _failed("bad_header", folder, f"cannot be read: {reason}", "check the disk, or fetch it again") from None


def folder_fingerprint(path: str | Path) -> str:
    """A short text that changes when a file of the folder is added, removed, replaced or written to; never raises."""
    seen = hashlib.sha256()
    try:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            found = entry.stat()
            # Not the time of the last write alone, which whoever restores a file sets back.
            state = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
            seen.update(f"{os.fsencode(entry.name)!r} {state}\n".encode())
    except (OSError, ValueError) as failed:
        seen.update(type(failed).__name__.encode())
    return seen.hexdigest()[:16]


def model_folder(model: ModelSettings, environment: Mapping[str, str] | None = None) -> Path:
    """The folder of a model of the manifest: its `path`, or its `repo` in the Hugging Face cache; no network.

    Raises:
        LoadFailed: kind `not_downloaded` when the cache does not hold the repository.
        NotPermitted: the cache may not be read.
    """
    if model.path is not None:
        return Path(model.path)
    repo = model.repo or ""
    cache = hub_cache(os.environ if environment is None else environment)
    stored = cache / f"models--{repo.replace('/', '--')}"
    try:
        with (stored / "refs" / "main").open(encoding="ascii") as file:
            revision = file.read(128).strip()
        snapshot = stored / "snapshots" / revision
        if re.fullmatch(r"[0-9a-zA-Z]+", revision) and snapshot.is_dir():
            return snapshot
    except PermissionError:
        raise NotPermitted(
            f"the Hugging Face cache `{shown(str(cache))}` may not be read",
            hint="make it readable for the user who runs omlxd",
        ) from None
    except (OSError, ValueError):
        pass  # not there, or not what the hub's client writes: the same to the user
    raise LoadFailed(
        f"`{shown(repo)}` is not in the Hugging Face cache `{shown(str(cache))}`",
        hint=f"`omlxd pull {shown(repo)}` fetches it",
        details={"kind": "not_downloaded", "repo": shown(repo)},
    )


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps its downloads under this environment."""
    home = environment.get("HOME") or "~"
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        written = cache
    elif hub_home := environment.get("HF_HOME"):
        written = f"{hub_home}/hub"
    else:
        written = f"{environment.get('XDG_CACHE_HOME') or f'{home}/.cache'}/huggingface/hub"
    try:
        return Path(written).expanduser()
    except RuntimeError:
        return Path(written)


def _names_in(folder: Path) -> frozenset[str]:
    hint = "check `path` in the manifest"
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, ValueError):  # ValueError: a NUL byte in the path
        raise _failed("missing_folder", folder, "does not exist", hint) from None
    except NotADirectoryError:
        raise _failed("not_a_folder", folder, "is not a folder", f"{hint}: it names the folder, not a file") from None


def _config(folder: Path, names: frozenset[str]) -> dict[str, Any]:
    if "config.json" not in names:
        raise _failed("no_config", folder, "has no config.json", "name the folder of an mlx-lm model")
    config = _json(folder / "config.json", "bad_config")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise _failed("bad_config", folder, "has a config.json without `model_type`", _REFETCH)
    if model_type != shown(model_type):
        raise _failed("bad_config", folder, f"has an impossible `model_type`: `{shown(model_type)}`", _REFETCH)
    if wrong := wrong_number(config):
        what = f"has a config.json whose `{wrong[0]}` is not a positive number: `{shown(json.dumps(wrong[1])[:40])}`"
        raise _failed("bad_config", folder, what, _REFETCH)
    installed = installed_architectures()
    # A `model_file` is code from the folder, which the engine refuses in its own words.
    if installed is not None and "model_file" not in config and not installed.support(config):
        what = f"has the model type `{shown(model_type)}`, which the installed mlx-lm does not support"
        raise _failed("unsupported_model", folder, what, "upgrade mlx-lm, or choose another model")
    return config


def _require_tokenizer_objects(folder: Path, names: frozenset[str], thorough: bool) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        if name not in names or not path.is_file():
            continue
        size_bytes = path.stat().st_size
        if size_bytes <= (_MAX_JSON_BYTES if thorough else _QUICK_JSON_BYTES):
            _json(path, "bad_tokenizer")
            continue
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not start.startswith(b"{"):
            raise _failed("bad_tokenizer", path, "does not hold a JSON object", _REFETCH)


def _headers(folder: Path, names: frozenset[str]) -> list[dict[str, Any]]:
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if not shards:
        raise _failed("no_weights", folder, "has no `model*.safetensors`", _advice_without_weights(names))
    _require_all_numbered(folder, shards)
    headers = []
    for name in shards:
        _require_file(folder / name, "bad_header")
        headers.append(read_header(folder / name))
    if "model.safetensors.index.json" in names:
        _require_indexed(folder, shards, headers)
    if not any(headers):
        raise _failed("no_weights", folder, "has weight files without a tensor", _REFETCH)
    return headers


def _require_indexed(folder: Path, shards: list[str], headers: Iterable[Mapping[str, Any]]) -> None:
    """Refuses when a shard that the index names is missing.

    A stale index beside complete weights is common after a conversion and harmless: mlx-lm does not read it. So a
    missing name counts only when its tensors are nowhere else.
    """
    path = folder / "model.safetensors.index.json"
    weight_map = _json(path, "bad_header").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise _failed("bad_header", path, "is not an index of weights", _REFETCH)
    here = {tensor for header in headers for tensor in header}
    missing = {shard for tensor, shard in weight_map.items() if shard not in shards and tensor not in here}
    if missing:
        raise _missing_shards(folder, sorted(missing))


def _require_all_numbered(folder: Path, shards: list[str]) -> None:
    """Refuses a set like `model-00001-of-00003` that is not complete, index or not."""
    numbered = [match for name in shards if (match := _NUMBERED.fullmatch(name))]
    for stem, total in {(match[1], match[3]) for match in numbered}:
        present = {match[2] for match in numbered if (match[1], match[3]) == (stem, total)}
        absent = [number for n in range(1, int(total) + 1) if (number := f"{n:05d}") not in present]
        if absent:
            raise _missing_shards(folder, [f"{stem}-{number}-of-{total}.safetensors" for number in absent])


def _missing_shards(folder: Path, missing: list[str]) -> LoadFailed:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    what = f"lacks the weight file `{shown(missing[0])}`{more}"
    return _failed("missing_shard", folder, what, "the download or copy is not complete; fetch the model again")


def _is_tokenizer(name: str) -> bool:
    return name in _TOKENIZER_FILES or name.endswith(".tiktoken")


def _advice_without_weights(names: frozenset[str]) -> str:
    if any(name.endswith(".gguf") for name in names):
        return "GGUF is for other programs; fetch the model in mlx-lm's format (safetensors)"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "`mlx_lm.convert` makes an mlx-lm model of it"
    return "name the folder of an mlx-lm model, or fetch its weights"


_KIND_WHEN_ABSENT: Final = {"bad_config": "no_config", "bad_header": "missing_shard", "bad_tokenizer": "no_tokenizer"}
_REFETCH: Final = "the file is damaged; fetch it again"


def _require_file(path: Path, kind: str) -> int:
    """The size of a regular file; anything else (a folder, a pipe that would block, a dangling link) is refused."""
    try:
        found = path.stat()
    except FileNotFoundError:
        kind = _KIND_WHEN_ABSENT[kind]
        raise _failed(kind, path, "is a link to a file that does not exist", "fetch the model again") from None
    if not stat.S_ISREG(found.st_mode):
        what = "is a folder, not a file" if stat.S_ISDIR(found.st_mode) else "is not a regular file"
        raise _failed(kind, path, what, "put the model's own file in its place")
    return found.st_size


def _json(path: Path, kind: str) -> dict[str, Any]:
    if _require_file(path, kind) > _MAX_JSON_BYTES:
        raise _failed(kind, path, "is larger than 64 MiB", _REFETCH)
    try:
        parsed = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise _failed(kind, path, "is not JSON", _REFETCH) from None
    if not isinstance(parsed, dict):
        raise _failed(kind, path, "does not hold a JSON object", _REFETCH)
    return parsed


def _count(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first positive whole number under one of the keys, at the top or in `text_config`."""
    nested = config.get("text_config")
    for table in (config, nested if isinstance(nested, dict) else {}):
        for key in keys:
            value = table.get(key)
            if type(value) is int and 0 < value < 2**31:
                return value
    return None


def _failed(kind: str, path: Path, what: str, hint: str) -> LoadFailed:
    return LoadFailed(f"`{shown(str(path))}` {what}", hint=hint, details={"kind": kind, "path": shown(str(path))})
