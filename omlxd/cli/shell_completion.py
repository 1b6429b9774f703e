"""What Tab offers in bash, zsh and fish: answers the scripts that `--install-completion` installs.

The scripts are Typer's; the answers are ours. Typer's own build every command for each Tab, import Rich for the texts
of zsh and fish, and do not know that bash parts words at a colon, which names of models may have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

VARIABLE: Final = "_OMLXD_COMPLETE"
FIRST_IS_A_MODEL: Final = frozenset({"load", "unload", "pin", "unpin", "run", "plan", "rm"})
"""Commands whose first argument is a model: the most frequent Tab is answered without the command-line library."""
_ANSWERED: Final = ("complete_bash", "complete_zsh", "complete_fish")


class Candidate(NamedTuple):
    """A word to choose, and what it means where that is known."""

    value: str
    help: str = ""


def answers(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this call is a Tab in one of our shells; other instructions (the script itself) are Typer's business."""
    return environ.get(VARIABLE) in _ANSWERED


def answer(environ: Mapping[str, str] = os.environ) -> int:
    """Write the candidates in the shell's form; the exit status. Never an error: that would be in somebody's way."""
    try:
        words, unfinished, before_colon = _typed(environ)
        found = candidates(words, unfinished)
        text, status = _FORMS[environ[VARIABLE]](found, before_colon, environ)
    except Exception:
        return 1
    sys.stdout.write(text)
    return status


def candidates(words: Sequence[str], unfinished: str) -> list[Candidate]:
    """What the unfinished word may become.

    Args:
        words: the words before it, without `omlxd`.
        unfinished: what of it was typed.
    """
    from omlxd.cli.command_names import COMMANDS, command_at, home_in

    at = command_at(words)
    if at >= len(words):
        if words and words[-1] == "--home":
            return []  # a folder: the shell knows those
        if unfinished.startswith("-"):
            return _from_command([], unfinished)
        return [Candidate(name) for name in COMMANDS if name.startswith(unfinished)]
    command, rest = words[at], words[at + 1 :]
    if command not in COMMANDS:
        return []
    if command in FIRST_IS_A_MODEL and not rest and not unfinished.startswith("-"):
        from omlxd.cli.known_models import known_names
        from omlxd.daemon.home import find_home

        home = find_home(home_in(words[:at]))
        return [Candidate(name) for name in known_names(home) if name.startswith(unfinished)]
    return _from_command(words, unfinished)


def _from_command(words: Sequence[str], unfinished: str) -> list[Candidate]:
    """From the command's own options and arguments, which only the command-line library knows."""
    import typer

    from omlxd.cli.command_names import command_at
    from omlxd.cli.main import build

    at = command_at(words)
    root: Any = typer.main.get_command(build([*words[at : at + 1]]))
    context = root.make_context("omlxd", list(words[:at]), resilient_parsing=True)
    command, rest = root, list(words[at:])
    while rest and hasattr(command, "commands"):
        name = rest.pop(0)
        command = command.commands.get(name)
        if command is None:
            return []
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    return _of_parameters(command, context, rest, unfinished)


def _of_parameters(command: Any, context: Any, rest: Sequence[str], unfinished: str) -> list[Candidate]:
    options = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts) if name[0] == "-"}
    previous = options.get(rest[-1]) if rest else None
    if previous is not None and not previous.is_flag:
        return _values(previous, context, unfinished)
    if unfinished.startswith("-"):
        longs = {name: each for name, each in options.items() if name.startswith("--") or len(unfinished) == 1}
        shown = [name for name in longs if name.startswith(unfinished) and not getattr(longs[name], "hidden", False)]
        helps = ["--help"] if "--help".startswith(unfinished) and "--help" not in options else []
        return [Candidate(name, _one_line(longs[name].help)) for name in shown] + [Candidate(name) for name in helps]
    if hasattr(command, "commands"):
        return [Candidate(name) for name in command.commands if name.startswith(unfinished)]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    filled = sum(_is_positional(at, rest, options) for at in range(len(rest)))
    if not arguments or (filled >= len(arguments) and arguments[-1].nargs != -1):
        return []
    return _values(arguments[min(filled, len(arguments) - 1)], context, unfinished)


def _is_positional(at: int, rest: Sequence[str], options: Mapping[str, Any]) -> bool:
    before = options.get(rest[at - 1]) if at else None
    return not rest[at].startswith("-") and (before is None or before.is_flag)


def _values(parameter: Any, context: Any, unfinished: str) -> list[Candidate]:
    return [Candidate(item.value, item.help or "") for item in parameter.shell_complete(context, unfinished)]


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _typed(environ: Mapping[str, str]) -> tuple[list[str], str, str]:
    """The finished words, the unfinished one, and of that what bash has parted off at a colon."""
    if environ[VARIABLE] == "complete_bash":
        # Typer's script joins the words by newlines.
        words = environ["COMP_WORDS"].split("\n")
        typed = [*words, ""][1 : int(environ["COMP_CWORD"]) + 1]
        joined = _joined_at_colons(typed)
        unfinished = joined[-1] if joined else ""
        return [_unquoted(word) for word in joined[:-1]], unfinished, unfinished[: unfinished.rfind(":") + 1]
    line = environ.get("_TYPER_COMPLETE_ARGS", "")
    words = [_unquoted(word) for word in line.split()][1:]
    if not words or line[-1:].isspace():
        return words, "", ""
    return words[:-1], words[-1], ""


def _joined_at_colons(words: Sequence[str]) -> list[str]:
    """`qwen`, `:`, `8b` are one word; bash takes them for three."""
    joined: list[str] = []
    for at, word in enumerate(words):
        if joined and (word.startswith(":") or (at and words[at - 1].endswith(":"))):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _unquoted(word: str) -> str:
    return word.strip("'\"").replace("\\", "")


def _for_bash(found: Sequence[Candidate], before_colon: str, environ: Mapping[str, str]) -> tuple[str, int]:
    return "\n".join(each.value.removeprefix(before_colon) for each in found), 0


def _for_zsh(found: Sequence[Candidate], before_colon: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """A command for `eval`: everything in it is quoted, so that no name can be more than a word."""
    if not found:
        return "_files", 0
    if any(each.help for each in found):
        described = " ".join(_quoted(f"{each.value.replace(':', chr(92) + ':')}:{each.help}") for each in found)
        return f"local -a omlxd_found=({described}); _describe omlxd omlxd_found", 0
    return "compadd -- " + " ".join(_quoted(each.value) for each in found), 0


def _for_fish(found: Sequence[Candidate], before_colon: str, environ: Mapping[str, str]) -> tuple[str, int]:
    if environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        return "", 0 if found else 1  # 1: fish offers files
    return "\n".join(f"{each.value}\t{each.help}" if each.help else each.value for each in found), 0


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_FORMS: Final[Mapping[str, Callable[[Sequence[Candidate], str, Mapping[str, str]], tuple[str, int]]]] = {
    "complete_bash": _for_bash,
    "complete_zsh": _for_zsh,
    "complete_fish": _for_fish,
}
