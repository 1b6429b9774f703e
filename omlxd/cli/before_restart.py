"""What the next daemon would refuse to start with, found while the one that runs still runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omlxd.cli.process import StartOptions
from omlxd.core.errors import InvalidRequest, ManifestInvalid, OmlxError, StartFailed
from omlxd.daemon.home import Home

if TYPE_CHECKING:
    from omlxd.core.manifest import Manifest
    from omlxd.core.saved_state import SavedState

KEPT: Final = "the daemon that runs was left as it is"


def require_startable(
    home: Home,
    options: StartOptions,
    before: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    *,
    listening: str | None = None,
) -> None:
    """Look at the manifest, its limits and pins on this machine, the API's key, and its port if that is another.

    Args:
        home: of the daemon.
        options: what the command line says now, and which manifest.
        before: the command line of the daemon that runs, which holds where `options` say nothing.
        environment: where the key may be; by default this process's own, which a daemon inherits.
        listening: where the API of the daemon that runs is, as `host:port`.

    Raises:
        ManifestInvalid: the manifest has problems, or its limits or pins contradict each other or this machine.
        InvalidRequest: the command line's limits do.
        StartFailed: there is no key where the manifest or the environment names one, or the port is taken.
    """
    from omlxd.daemon.api_key import api_key_of  # the daemon's own checks: 0.4 s that no other command needs
    from omlxd.daemon.manifest_file import read_manifest
    from omlxd.daemon.state_file import read_state

    try:
        manifest, saved = read_manifest(options.over(before).path(home)), read_state(home.state)
        try:
            soft_bytes = _soft_bytes(manifest, saved, options.over(before))
        except OmlxError:
            if "max_memory" not in before:
                raise
            # A limit that was set since takes the place of what the start was told.
            others = {key: value for key, value in before.items() if key != "max_memory"}
            soft_bytes = _soft_bytes(manifest, saved, options.over(others))
        _check_pins(manifest, saved, soft_bytes)
        api_key_of(manifest.api, environment)
        _check_port(manifest, listening)
    except (ManifestInvalid, InvalidRequest, StartFailed) as error:
        error.hint = f"{error.hint}; {KEPT}" if error.hint else KEPT
        raise


def _check_port(manifest: Manifest, listening: str | None) -> None:
    """Whether somebody else has it; what the daemon that runs has, it gives back."""
    from omlxd.daemon.sockets import bind_tcp

    address = manifest.api.address
    if address is not None and str(address.port) != (listening or "").rpartition(":")[2]:
        bind_tcp(address, manifest=Path(manifest.path)).close()


def _soft_bytes(manifest: Manifest, saved: SavedState, options: StartOptions) -> int:
    """The limit that a start would take, 0 for none; raises as a start does."""
    from omlxd.daemon.flags import Flags
    from omlxd.daemon.machine import find_machine
    from omlxd.daemon.starting import enforcer_settings

    machine, flags = find_machine(), Flags(options.max_memory, options.hard_limit)
    return enforcer_settings(manifest, machine, saved, flags, lambda _: None).limits(machine).soft_bytes


def _check_pins(manifest: Manifest, saved: SavedState, soft_bytes: int) -> None:
    """A model that is pinned in the manifest and larger than the limit; one that cannot be read is no reason."""
    from omlxd.daemon.manifest_source import placed
    from omlxd.daemon.model_files import model_folder, read_model_folder
    from omlxd.daemon.starting import pin_problem, pins_too_large

    problems = []
    for model in manifest.models.values():
        if model.pin and saved.pinned(model.name, model.pin):
            try:
                weights_bytes = read_model_folder(model_folder(model)).weights_bytes
            except OmlxError:
                continue
            if 0 < soft_bytes < weights_bytes:
                problems.append(pin_problem(model.name, weights_bytes, soft_bytes))
    if problems:
        raise pins_too_large(manifest, placed(problems, manifest.path))
