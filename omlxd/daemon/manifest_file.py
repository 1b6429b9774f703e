"""Reads the manifest: from a TOML file to a checked `Manifest`, or all of its problems at once.

Model folders are not looked at while parsing (a disk may be away, the daemon starts all the same); `model_check`
does that for `omlxd check` and for the start.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from omlxd.core.manifest import ApiSettings, DaemonSettings, Manifest, ModelSettings
from omlxd.daemon.manifest_findings import cross_findings
from omlxd.daemon.manifest_schema import Document, ModelTable, findings
from omlxd.daemon.manifest_source import in_file_order, invalid_manifest, lines_of_keys, read_text, read_toml


def read_manifest(path: str | Path) -> Manifest:
    """The manifest at this path; paths in it are relative to its folder.

    Raises:
        ManifestInvalid: the file is missing, is not TOML, or has problems (`problems` lists all of them).
        NotPermitted: the file may not be read.
    """
    path = Path(path)
    return parse_manifest(read_text(path), path)


def parse_manifest(text: str, path: str | Path) -> Manifest:
    """The manifest in this text, as if it stood in the file at `path`; raises ManifestInvalid."""
    path = Path(path).absolute()
    raw = read_toml(text, path)
    found = list(cross_findings(raw))
    try:
        document = Document.model_validate(raw, context={"folder": path.parent})
    except ValidationError as invalid:
        found += findings(invalid)
        document = None
    if found or document is None:
        raise invalid_manifest(path, in_file_order(found, lines_of_keys(text)))
    return _manifest(document, path)


def _manifest(document: Document, path: Path) -> Manifest:
    daemon, api = document.daemon, document.api
    return Manifest(
        daemon=DaemonSettings(
            max_memory=daemon.max_memory,
            hard_limit=daemon.hard_limit,
            min_available=daemon.min_available,
            poll_interval_s=daemon.poll_interval,
            policy=daemon.policy,
            prefill_memory_guard=daemon.prefill_memory_guard,
            drain_timeout_s=daemon.drain_timeout,
            load_timeout_s=daemon.load_timeout,
            park_deadline_s=daemon.park_deadline,
            fair_wait_s=daemon.fair_wait,
            stall_timeout_s=daemon.stall_timeout,
            prefill_chunk_tokens=daemon.prefill_chunk,
            max_batch=daemon.max_batch,
            max_waiting=daemon.max_waiting,
            prefix_cache=daemon.prefix_cache,
            restore=daemon.restore,
            keep_awake=daemon.keep_awake,
            log_level=daemon.log_level,
            log_max_size_bytes=daemon.log_max_size,
            log_backups=daemon.log_backups,
        ),
        api=ApiSettings(
            listen=api.listen,
            api_key=api.api_key,
            api_key_file=api.api_key_file,
            allow_origins=tuple(api.allow_origins),
            max_keep_alive_s=api.max_keep_alive,
        ),
        models={name: model_settings(name, table) for name, table in document.models.items()},
        path=str(path),
    )


def model_settings(name: str, table: ModelTable) -> ModelSettings:
    """A model's settings, from its table in the manifest."""
    return ModelSettings(
        name=name,
        path=table.path,
        repo=table.repo,
        pin=table.pin,
        preload=table.preload,
        aliases=tuple(table.aliases),
        ttl_s=table.ttl,
        max_context=table.max_context,
    )
