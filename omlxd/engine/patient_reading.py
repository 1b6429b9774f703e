"""Has mlx-lm and transformers read a tokenizer through `tokenizer_file`, which lets others have the interpreter's lock.

Between them they parse the same `tokenizer.json` two or three times, make the tokenizer of it once more, and ask for
the whole vocabulary three times, each time with the lock held from beginning to end. While a tokenizer is read here the
names under which their modules know `json` and `tokenizers` stand for what goes about it in slices, and once. A name
that an upgrade has moved is left alone: then it takes as long as before, and tests/engine/test_mlxlm_contract.py says
which it is.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from omlxd.engine.tokenizer_file import build, read_in_slices

JSON_READERS: Final = (
    "mlx_lm.tokenizer_utils",
    "transformers.tokenization_utils_base",
    "transformers.tokenization_utils_tokenizers",
)
"""Modules that know the standard library's `json` by its name, and read the file with its `load`."""
BACKEND: Final = "transformers.tokenization_utils_tokenizers"
"""The module that makes a tokenizer of the file, with what it calls `TokenizerFast`."""

_one_at_a_time = threading.Lock()


@contextmanager
def patiently(folder: Path) -> Iterator[None]:
    """What is read of this folder's `tokenizer.json` in here, on any thread, is read in slices."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        yield
        return
    with _one_at_a_time, ExitStack() as undo:
        reading = _Reading(path)
        for name in JSON_READERS:
            if getattr(sys.modules.get(name), "json", None) is json:
                patient_json = SimpleNamespace(**{**vars(json), "load": reading.load})
                undo.callback(_put(sys.modules[name], "json", patient_json))
        backend: Any = sys.modules.get(BACKEND)
        if hasattr(backend, "TokenizerFast"):
            undo.callback(_put(backend, "TokenizerFast", _Maker(backend.TokenizerFast, reading)))
        kind: Any = getattr(backend, "TokenizersBackend", None)
        if "get_vocab" in getattr(kind, "__dict__", {}):
            asked = kind.get_vocab
            undo.callback(_put(kind, "get_vocab", lambda tokenizer: reading.vocabulary(tokenizer, asked)))
        yield


def _put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Give a name another value; what is returned gives it its own again."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


class _Reading:
    """One file, parsed when somebody asks for it first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, Any] | None = None
        self._vocabularies: dict[int, dict[str, int]] = {}

    def load(self, file: Any, **options: Any) -> Any:
        """`json.load`, of this file in slices and once; a caller may change what it is given."""
        if options or not self._is(getattr(file, "name", None)):
            return json.load(file, **options)
        content = dict(self.content)
        if isinstance(model := content.get("model"), dict):
            content["model"] = {key: _shallow(value) for key, value in model.items()}
        if "added_tokens" in content:
            content["added_tokens"] = deepcopy(content["added_tokens"])
        return content

    def tokenizer(self, path: str) -> Any:
        """The tokenizer of this file; None when only the library itself can make it."""
        if not self._is(path):
            return None
        try:
            return build(self.content)
        except Exception:  # whatever is wrong, the library has the word for it
            return None

    def vocabulary(self, tokenizer: Any, get_vocab: Callable[[Any], dict[str, int]]) -> dict[str, int]:
        """All tokens with their ids, asked for one by one and kept."""
        if id(tokenizer) not in self._vocabularies:
            backend = tokenizer._tokenizer
            size = backend.get_vocab_size(with_added_tokens=True)
            found = {backend.id_to_token(token): token for token in range(size)}
            whole = None not in found and len(found) == size  # or there are gaps between its ids
            self._vocabularies[id(tokenizer)] = found if whole else get_vocab(tokenizer)
        return self._vocabularies[id(tokenizer)]

    @property
    def content(self) -> dict[str, Any]:
        """What the file holds."""
        if self._content is None:
            self._content = read_in_slices(self._path)
        return self._content

    def _is(self, path: Any) -> bool:
        return isinstance(path, str | Path) and Path(path).name == self._path.name and self._path.samefile(path)


class _Maker:
    """Stands for `tokenizers.Tokenizer`: makes the one of the file that is read from its parts."""

    def __init__(self, kind: Any, reading: _Reading) -> None:
        self._kind, self._reading = kind, reading

    def __call__(self, *arguments: Any) -> Any:
        return self._kind(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def from_file(self, path: str) -> Any:
        """As the library's."""
        return self._reading.tokenizer(path) or self._kind.from_file(path)


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value
