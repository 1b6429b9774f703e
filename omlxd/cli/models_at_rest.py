"""The models of the manifest as `omlxd models` shows them where no daemon runs: what they are, and no state."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from omlxd.core.manifest import ModelSettings
from omlxd.core.states import SCHEMA, ModelView
from omlxd.daemon.home import Home
from omlxd.daemon.manifest_file import read_manifest
from omlxd.daemon.model_check import ModelReport, check_models


def models_at_rest(home: Home) -> dict[str, Any]:
    """What the daemon would answer, with None for the state and for all that only a daemon knows.

    Raises:
        ManifestInvalid, NotPermitted: the manifest cannot be read, or is wrong.
    """
    manifest = read_manifest(home.manifest)
    views = [_view(manifest.models[report.name], report) for report in check_models(manifest)]
    return {"schema": SCHEMA, "models": views}


def _view(model: ModelSettings, report: ModelReport) -> dict[str, Any]:
    known = {
        "name": model.name,
        "pinned": model.pin,
        "aliases": list(model.aliases),
        "path": report.path or model.path or model.repo,
        "weights_bytes": report.weights_bytes,
        "context_length": report.context_length,
        "error": "; ".join(report.problems) or None,
        "removed": False,
    }
    counts = dict.fromkeys(("kv_bytes", "prefix_cache_bytes", "committed_bytes", "running", "waiting", "parked"), 0)
    return {field.name: None for field in fields(ModelView)} | counts | known
