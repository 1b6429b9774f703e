"""What the command line said when the daemon was started; it comes before the run-time value and the manifest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omlxd.core.manifest import Manifest
from omlxd.core.memory import Policy


@dataclass(frozen=True, slots=True)
class Flags:
    """The limits as written, and the policy; None where the run-time value or the manifest decides."""

    max_memory: str | None = None
    hard_limit: str | None = None
    policy: Policy | None = None

    def over(self, manifest: Manifest) -> Manifest:
        """The manifest with the policy that holds."""
        if self.policy is None:
            return manifest
        return replace(manifest, daemon=replace(manifest.daemon, policy=self.policy))
