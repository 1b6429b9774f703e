"""The Hugging Face hub, through huggingface_hub: what a repository has, its download, and what went wrong in words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omlxd.cli import output
from omlxd.core.errors import LoadFailed, NotPermitted, OmlxError, UnknownModel
from omlxd.core.wording import shown
from omlxd.daemon.model_files import hub_cache

WANTED: Final = ["*.json", "model*.safetensors", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken", "*.jsonl"]
"""What mlx-lm reads of a repository, but for code."""
UNWANTED: Final = ["*/*"]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a repository holds of a model, in bytes.

    Attributes:
        weights_bytes: its safetensors files, which is what they take in memory too.
        total_bytes: all that is wanted.
        missing_bytes: what of it is not here yet; a file that was begun counts whole.
        files: how many files are wanted.
    """

    weights_bytes: int
    total_bytes: int
    missing_bytes: int
    files: int


def look_up(repo: str) -> Contents:
    """What a download would bring, asked of the hub; raises what `told` raises."""
    with told(repo):
        from huggingface_hub import snapshot_download  # 0.3 s

        found: list[Any] = snapshot_download(
            repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, dry_run=True, **_where()
        )
    weights = [each.file_size or 0 for each in found if each.filename.endswith(".safetensors")]
    if not weights:
        raise LoadFailed(
            f"`{repo}` has no `model*.safetensors`, so mlx-lm cannot load it",
            hint=f"look for a conversion at {endpoint()}/mlx-community",
            details={"kind": "no_weights"},
        )
    return Contents(
        weights_bytes=sum(weights),
        total_bytes=sum(each.file_size or 0 for each in found),
        missing_bytes=sum(each.file_size or 0 for each in found if each.will_download),
        files=len(found),
    )


def fetch_config(repo: str) -> Path:
    """Download config.json alone, so that a model that cannot run is refused before its weights come."""
    with told(repo):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, "config.json", **_where()))


def fetch(repo: str) -> Path:
    """Download the files that are missing, with the hub's progress on a terminal.

    A connection that breaks is taken up where it broke, as long as this process lives; files that are complete are
    kept for the next one.
    """
    with told(repo):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # its names are lazy

        if not output.is_terminal(sys.stderr):
            disable_progress_bars()
        return Path(snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, **_where()))


def unfinished(repo: str) -> set[Path]:
    """The files of downloads that are going on, or were killed."""
    blobs = hub_cache(os.environ) / f"models--{repo.replace('/', '--')}" / "blobs"
    return set(blobs.glob("*.incomplete"))


def endpoint() -> str:
    """Where the hub is."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _where() -> dict[str, Any]:
    """The hub and its cache, as the rest of omlxd finds them."""
    return {"endpoint": endpoint(), "cache_dir": hub_cache(os.environ)}


@contextmanager
def told(repo: str) -> Iterator[None]:
    """The errors of huggingface_hub and of what it uses as ours.

    Raises:
        UnknownModel: the hub has no such repository, or shows it to others only.
        NotPermitted: it wants a login or a licence accepted, or a folder may not be written.
        OmlxError: no network, a connection that broke off, a full disk.
    """
    try:
        yield
    except OmlxError:
        raise
    except Exception as error:  # of half a dozen libraries
        raise _told(repo, error) from error


def _told(repo: str, error: BaseException) -> OmlxError:
    from huggingface_hub import errors

    again = f"`omlxd pull {repo}` goes on with the files that are missing"
    if isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError) and isinstance(
        error.__cause__, Exception
    ):
        error = error.__cause__
    if isinstance(error, errors.GatedRepoError):
        return NotPermitted(
            f"`{repo}` is shown only to those who accepted its terms",
            hint=f"accept them at {endpoint()}/{repo}, then `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UnknownModel(
            f"{endpoint()} has no model `{repo}`, or does not show it to you",
            hint=f"check the name at {endpoint()}/models; `hf auth login` for a private one",
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return LoadFailed(
            f"`{repo}` has no config.json, so it is not a model that mlx-lm can load",
            hint=f"look for another at {endpoint()}/mlx-community",
            details={"kind": "no_config"},
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return OmlxError(
            "`HF_HUB_OFFLINE` forbids to ask the Hugging Face hub", hint="`omlxd find` lists what is here already"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return OmlxError(f"{endpoint()} answered {error.response.status_code} for `{repo}`", hint=f"later, {again}")
    if isinstance(error, OSError) and error.filename is not None:
        kind = NotPermitted if isinstance(error, PermissionError) else OmlxError
        return kind(
            f"cannot write `{shown(str(error.filename))}`: {error.strerror}",
            hint=f"make room or set `HF_HOME` to another disk; {again}",
        )
    if isinstance(error, OSError) and error.strerror:
        return OmlxError(f"the download failed: {error.strerror}", hint=f"make room; {again}")
    return OmlxError(
        f"{endpoint()} could not be reached, or broke off: {_first_line(error)}",
        hint=f"check the network (`HF_ENDPOINT` names another address); {again}",
    )


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return shown(lines[0].strip()) if lines else type(error).__name__
