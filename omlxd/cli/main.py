"""The `omlxd` command: its list of commands, and what becomes of an error, Ctrl-C or a closed pipe."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from omlxd import __version__
from omlxd.cli import output
from omlxd.cli.command_names import COMMANDS, command_at
from omlxd.cli.invocation import Invocation
from omlxd.core.errors import InvalidRequest, NotPermitted, OmlxError

INTERRUPTED: Final = 130

# Typer brings a click of its own since 0.26; its exceptions are found from the one name that Typer exports.
_USAGE_ERROR: Final = typer.BadParameter.__mro__[1]
_CLICK_EXCEPTION: Final = _USAGE_ERROR.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status."""
    output.never_fail_to_encode()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    status_code = _run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status_code = _reader_left()
    sys.exit(status_code)


def build(commands: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands; one alone is built in half of the time that all take."""
    app = typer.Typer(
        name="omlxd",
        help="Keeps local language models in memory under a limit that holds, and answers with them.",
        epilog="`omlxd init` writes a manifest, `omlxd start` starts, `omlxd demo` shows it all. See man omlxd(1).",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # model names are not markup, and help needs no Rich
    )
    app.callback(invoke_without_command=True)(global_options)
    for name in commands:
        module = import_module(f"omlxd.cli.{COMMANDS[name]}")
        if name == "ps":
            app.command("ps", help="The same as `status`.")(module.status)
        elif isinstance(group := getattr(module, name), typer.Typer):
            app.add_typer(group, name=name)
        else:
            # A negative size is a wrong size and not an unknown option.
            settings = {"ignore_unknown_options": True} if name == "limit" else None
            app.command(name, context_settings=settings)(getattr(module, name))
    return app


def global_options(
    context: typer.Context,
    home: Annotated[
        Path | None, typer.Option("--home", metavar="DIR", help="Home directory; default $OMLXD_HOME or ~/.omlxd.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Options that stand before the command."""
    if version:
        output.data(f"omlxd {__version__}")
        raise typer.Exit
    context.obj = Invocation(home_directory=home, debug=debug)
    if context.invoked_subcommand is None:
        sys.stderr.write(context.get_help() + "\n")
        raise typer.Exit(2)


def _run(arguments: Sequence[str]) -> int:
    try:
        _invoke(list(arguments))
        return 0
    except typer.Exit as end:
        return end.exit_code
    except SystemExit as end:  # ended by a signal (`demo`); caught here, so that what it left open is closed
        return end.code if isinstance(end.code, int) else 1
    except OmlxError as error:
        if _wants_traceback(arguments):
            raise
        output.report(error)
        return error.exit_status
    except BrokenPipeError:
        return _reader_left()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if _wants_traceback(arguments):
            raise
        return _report_foreign(error)


def _invoke(arguments: list[str]) -> None:
    if "_OMLXD_COMPLETE" in os.environ:
        typer.main.get_command(build()).main(arguments, prog_name="omlxd")
    named = arguments[at] if (at := command_at(arguments)) < len(arguments) else ""
    command = typer.main.get_command(build([named] if named in COMMANDS else COMMANDS))
    # Not its `main`: that ends a closed pipe with status 1 by itself, and Ctrl-C with a blank line.
    with command.make_context("omlxd", arguments) as context:
        command.invoke(context)


def _report_foreign(error: Exception) -> int:
    if isinstance(error, _CLICK_EXCEPTION):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "omlxd"
        message = error.format_message().rstrip(".").replace("'", "`")  # type: ignore[attr-defined]
        output.report(InvalidRequest(message[:1].lower() + message[1:], hint=f"`{command} --help`"))
        return InvalidRequest.exit_status
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        refused = _refused_file(error)
        output.report(refused)
        return refused.exit_status
    output.report(
        OmlxError(
            f"something inside omlxd failed: {type(error).__name__}: {error}",
            hint="`omlxd --debug ...` shows where; please report it",
        )
    )
    return OmlxError.exit_status


def _refused_file(error: OSError) -> OmlxError:
    """The system's word about a file is the user's business and no fault of ours."""
    verb = "write" if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT) else "use"
    kind = NotPermitted if isinstance(error, PermissionError) else OmlxError
    return kind(
        f"cannot {verb} `{os.fsdecode(error.filename)}`: {error.strerror}",
        hint="`omlxd --debug ...` shows where; `--home` or `OMLXD_HOME` names another home",
    )


def _wants_traceback(arguments: Sequence[str]) -> bool:
    """`--debug` stands before the command, so it counts even when parsing did not come that far."""
    return "--debug" in arguments[: command_at(arguments)]


def _reader_left() -> int:
    """The reader of our pipe has seen enough: no error, and no complaint from Python's flush at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
