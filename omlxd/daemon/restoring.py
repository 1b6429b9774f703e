"""Which models are loaded is kept in the state file: a restart, or a start after a crash, can go on with them.

Until the start has tried them all, the list of the last daemon stays: whoever ends this one meanwhile loses none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omlxd.core.events import Event, EventName
from omlxd.core.manifest import Restore
from omlxd.core.saved_state import SavedState
from omlxd.core.states import DaemonState
from omlxd.daemon.app import Daemon
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.home import Home


def keep_what_is_loaded(daemon: Daemon) -> None:
    """From now on each load and unload is noted; nobody waits for that."""

    def note(event: Event) -> None:
        starting = daemon.state is DaemonState.STARTING
        if event.event in (EventName.LOAD_FINISHED, EventName.UNLOADED) and not starting:
            newest = event.model if event.event is EventName.LOAD_FINISHED else None
            daemon.in_background(note_what_is_loaded(daemon, newest))

    daemon.bus.add_sink(note)


async def note_what_is_loaded(daemon: Daemon, newest: str | None = None) -> None:
    """Write down which models are loaded: `newest`, then those that were used last; and that nobody restarts."""
    loaded = [entry for entry in daemon.pool.entries.values() if entry.loaded and not entry.removed]
    loaded.sort(key=lambda entry: (entry.name != newest, -(entry.last_used or 0.0)))
    names = tuple(entry.name for entry in loaded)
    await daemon.state_file.change(lambda state: replace(state, loaded=names, restart=False))


async def note_the_end(daemon: Daemon, *, was_ready: bool) -> None:
    """Leave word for the successor; before all models were tried, the word that was found is the right one."""
    if was_ready:
        await note_what_is_loaded(daemon)
    await daemon.state_file.change(lambda state: replace(state, start={}, restart=daemon.stop.to_restart))


async def note_the_start(daemon: Daemon, manifest: Path, home: Home) -> None:
    """Write down what the command line said, so that a restart after a crash can say it again.

    What was said at run time of a model that has gone from the home's own manifest has gone with it.
    """
    said = {key: value for key, value in daemon.flags.to_json().items() if value is not None}
    if manifest != home.manifest:
        said["manifest"] = str(manifest)
    its_own = manifest == home.manifest and bool(daemon.manifest.models)  # an emptied one is a mistake, or will be

    def with_start(state: SavedState) -> SavedState:
        return replace(state.without_outdated(daemon.manifest) if its_own else state, start=said)

    await daemon.state_file.change(with_start)


def wanted_first(daemon: Daemon) -> list[EnginePoolEntry]:
    """What the start loads: the manifest's pins and preloads, less what was unpinned since, and what is restored."""
    entries, flags = daemon.pool.entries, daemon.flags
    restarted = flags.restarted or daemon.state_file.state.restart
    restore = Restore.chosen(flags.restore, daemon.manifest.daemon.restore, restarted=restarted)
    wanted = [
        entry
        for entry in entries.values()
        if entry.settings.preload or (entry.pinned and (entry.settings.pin or restore is not Restore.NONE))
    ]
    before = daemon.state_file.state.loaded if restore is Restore.LOADED else ()
    return wanted + [entries[name] for name in before if name in entries and entries[name] not in wanted]
