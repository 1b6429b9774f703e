"""Finds models on this machine: in the Hugging Face cache and in folders; reads configs and headers, no weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omlxd.core.errors import LoadFailed, NotPermitted
from omlxd.core.manifest import Manifest, ModelSettings
from omlxd.daemon.home import Home
from omlxd.daemon.model_files import hub_cache, model_folder, read_model_folder

if TYPE_CHECKING:
    from omlxd.daemon.model_files import ModelFiles

DEEPEST: Final = 4
"""How far below a folder is looked: `models/organisation/name` and one more."""
MOST_FOLDERS: Final = 20_000
_ELSEWHERE: Final = ("~/models", "~/.lmstudio/models", "~/.cache/lm-studio/models")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is: a repository in the Hugging Face cache, or a folder.

    Attributes:
        written: the repository's name, or the folder's path.
        repo: whether it is a repository.
    """

    written: str
    repo: bool

    def settings(self, name: str) -> ModelSettings:
        """The model of this name, as a manifest would have it."""
        return ModelSettings(name, repo=self.written) if self.repo else ModelSettings(name, path=self.written)


@dataclass(frozen=True, slots=True)
class Found:
    """A model that is whole, or why something that looks like one is none.

    Attributes:
        source: where it is.
        folder: its files.
        files: what they hold; None when they are not a model that can be loaded.
        error: what is wrong with them; None when nothing is.
    """

    source: Source
    folder: Path | None
    files: ModelFiles | None
    error: LoadFailed | NotPermitted | None = None

    @property
    def problem(self) -> str:
        """What is wrong, with the next step, in a line; empty when nothing is."""
        if self.error is None:
            return ""
        return f"{self.error.message}; {self.error.hint}" if self.error.hint else self.error.message


def default_folders(home: Home, manifest: Manifest) -> list[Path]:
    """Where models may be beside the cache: the home's, usual folders, and those that the manifest's models are in.

    Whether they exist or not.
    """
    beside = [Path(model.path).parent for model in manifest.models.values() if model.path]
    usual = [Path(each).expanduser() for each in _ELSEWHERE]
    return list(dict.fromkeys([home.root / "models", *usual, *beside]))


def find_models(folders: Sequence[Path], *, cache: bool, environment: Mapping[str, str] = os.environ) -> list[Found]:
    """What is in these folders and, with `cache`, in the Hugging Face cache; each model once."""
    hub = hub_cache(environment).resolve()
    sources = [*_in_cache(hub)] if cache else []
    for folder in folders:
        sources += [Source(str(each), repo=False) for each in _model_folders(folder, hub)]
    seen: dict[str, Found] = {}
    for source in sources:
        found = look_at(source)
        seen.setdefault(str(found.folder.resolve()) if found.folder else source.written, found)
    return list(seen.values())


def look_at(source: Source, *, thorough: bool = False) -> Found:
    """What is there."""
    folder = None
    try:
        folder = model_folder(source.settings("it"))
        return Found(source, folder, read_model_folder(folder, thorough=thorough))
    except (LoadFailed, NotPermitted) as error:
        return Found(source, folder, None, error)


def _in_cache(hub: Path) -> Iterator[Source]:
    try:
        names = sorted(each.name for each in hub.iterdir() if each.is_dir())
    except OSError:
        return
    for name in names:
        kind, _, repo = name.partition("--")
        if kind == "models" and repo.count("--") == 1:
            yield Source(repo.replace("--", "/"), repo=True)


def _model_folders(top: Path, hub: Path) -> Iterator[Path]:
    """Folders with a config.json; nothing is looked for inside of one, in hidden folders or in the cache."""
    depth = len(top.parts)
    for count, (at, names, files) in enumerate(os.walk(top)):
        here = Path(at)
        if count >= MOST_FOLDERS:
            return
        if "config.json" in files:
            names.clear()
            yield here
        elif len(here.parts) - depth >= DEEPEST:
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith(".") and (here / name).resolve() != hub)
        for name in names:
            # A link is a model or nothing: what is below of it may be anything, and may lead back here.
            if (here / name).is_symlink() and (here / name / "config.json").is_file():
                yield here / name
