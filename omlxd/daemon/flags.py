"""What the command line said when the daemon was started; it comes before the run-time value and the manifest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omlxd.core.manifest import Manifest, Restore
from omlxd.core.memory import Policy


@dataclass(frozen=True, slots=True)
class Flags:
    """None where the run-time value or the manifest decides.

    Attributes:
        max_memory, hard_limit: as written.
        policy: how pressure is answered.
        restore: what is loaded at the start.
        restarted: it takes the place of a daemon that was stopped for it.
    """

    max_memory: str | None = None
    hard_limit: str | None = None
    policy: Policy | None = None
    restore: Restore | None = None
    restarted: bool = False

    def over(self, manifest: Manifest) -> Manifest:
        """The manifest with the policy that holds."""
        if self.policy is None:
            return manifest
        return replace(manifest, daemon=replace(manifest.daemon, policy=self.policy))

    def to_json(self) -> dict[str, str | None]:
        """What a restart says again."""
        policy = None if self.policy is None else self.policy.value
        return {"max_memory": self.max_memory, "hard_limit": self.hard_limit, "policy": policy}
