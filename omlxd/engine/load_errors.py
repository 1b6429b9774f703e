"""What is wrong with a model's folder, in one sentence, from the exceptions that mlx-lm is known to raise."""

from __future__ import annotations

import json
from pathlib import Path

from omlxd.core.errors import DoesNotFit, EngineFailed, LoadFailed, OmlxError
from omlxd.engine.mishaps import is_out_of_files, is_out_of_memory, no_files_left
from omlxd.engine.orders import LoadOrder

# Not `omlxd check`: the daemon has looked at all that it looks at before it ordered the load.
_AGAIN = "download the model again, or choose another conversion of it"


def explain(error: BaseException, order: LoadOrder) -> OmlxError:
    """What went wrong with a folder, in one sentence, from the exceptions mlx-lm is known to raise."""
    text = one_line(error)
    if is_out_of_files(error):
        return no_files_left(order.model)
    if not Path(order.path).is_dir():
        return disappeared(order)
    if isinstance(error, ImportError):
        return EngineFailed(
            f"cannot load `{order.model}`: {text}", hint="install what is missing, then `omlxd restart`"
        )
    if is_out_of_memory(error):
        return DoesNotFit(f"the device ran out of memory while loading `{order.model}`", hint="lower `max_memory`")
    kind, what, hint = _explain_folder(error, text)
    return LoadFailed(f"cannot load `{order.model}`: {what}", hint=hint, details={"kind": kind, "path": order.path})


def disappeared(order: LoadOrder) -> LoadFailed:
    """Its folder was there when the load began."""
    return LoadFailed(
        f"the files of `{order.model}` disappeared while it was loaded",
        hint=f"put the model back at `{order.path}`, then load it again",
        details={"kind": "missing_folder", "path": order.path},
    )


def _explain_folder(error: BaseException, text: str) -> tuple[str, str, str]:
    """Kind, sentence and next step for an error that the folder's files caused."""
    if isinstance(error, FileNotFoundError):
        return "missing_file", text, _AGAIN
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "bad_config", f"`config.json` cannot be read: {text}", _AGAIN
    if isinstance(error, ValueError):
        return _explain_value_error(text)
    if isinstance(error, RuntimeError):
        again = "the file may be truncated or damaged: download it again"
        return "bad_weights", f"the weights cannot be read: {text}", again
    if isinstance(error, OSError):
        return "unreadable", text, "check the permissions and the disk"
    return "bad_config", f"`config.json` lacks a field or has a wrong one: {text}", _AGAIN


def _explain_value_error(text: str) -> tuple[str, str, str]:
    if "Model type" in text and "not supported" in text:
        model_type = text.partition("Model type ")[2].partition(" not supported")[0]
        what = f"this version of mlx-lm does not support the model type `{model_type}`"
        return "unsupported_model", what, "upgrade mlx-lm, or choose another model"
    if "parameter" in text:
        return "weights_mismatch", f"the weights do not match `config.json` (a shard may be missing): {text}", _AGAIN
    if "custom module" in text:
        what = "the model wants to run code from its folder, which omlxd never does"
        return "remote_code", what, "choose a conversion of the model that needs no code of its own"
    return "bad_model", text, _AGAIN


def one_line(error: BaseException) -> str:
    """Its words, on one line and not too many; with its kind where they may say little."""
    text = " ".join(str(error).split())[:300]
    plain = isinstance(error, ValueError | RuntimeError | OSError) and text
    return text if plain else f"{type(error).__name__}: {text}"
