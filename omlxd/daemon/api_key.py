"""The key that clients on TCP must send: from the environment, from a file, or from the manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from omlxd.core.errors import StartFailed
from omlxd.core.manifest import ApiSettings
from omlxd.core.wording import shown

KEY_VARIABLE = "OMLXD_API_KEY"
KEY_RULE = "8 to 512 printable ASCII characters without spaces"
_KEY = re.compile(r"[!-~]{8,512}")
_LONGEST_FILE_BYTES = 4096


def is_api_key(text: str) -> bool:
    """Whether this can be a key."""
    return _KEY.fullmatch(text) is not None


def api_key_of(settings: ApiSettings, environment: Mapping[str, str] | None = None) -> str | None:
    """The key in force, None when none is asked for or TCP is off; the environment's comes before the file's and the
    manifest's.

    Raises:
        StartFailed: the variable or the file holds no key; what they hold is in no message.
    """
    if settings.address is None:
        return None
    if given := (os.environ if environment is None else environment).get(KEY_VARIABLE):
        if not is_api_key(given):
            raise StartFailed(f"`{KEY_VARIABLE}` is not a key", hint=f"make it {KEY_RULE}")
        return given
    return settings.api_key if settings.api_key_file is None else _read(Path(settings.api_key_file))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            key = file.read(_LONGEST_FILE_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise StartFailed(
            f"the key file `{shown(str(path))}` cannot be read: {error.strerror}",
            hint="correct `api.api_key_file` in the manifest, or make the file readable",
        ) from None
    if not is_api_key(key):
        raise StartFailed(f"the file `{shown(str(path))}` does not hold a key", hint=f"it needs {KEY_RULE}")
    return key
