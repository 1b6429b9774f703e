"""The `omlxd` command: its list of commands, and what becomes of an error, Ctrl-C or a closed pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from omlxd import __version__
from omlxd.cli import daemon, demo, limit, logs, manifest, models, output, requests, run, status
from omlxd.cli.invocation import Invocation
from omlxd.core.errors import InvalidRequest, OmlxError

INTERRUPTED: Final = 130

# Typer brings a click of its own since 0.26; its exceptions are found from the one name that Typer exports.
_USAGE_ERROR: Final = typer.BadParameter.__mro__[1]
_CLICK_EXCEPTION: Final = _USAGE_ERROR.__mro__[1]

app = typer.Typer(
    name="omlxd",
    help="Keeps local language models in memory under a limit that holds, and answers with them.",
    epilog="`omlxd init` writes a manifest, `omlxd start` starts, `omlxd demo` shows it all. See man omlxd(1).",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # model names are not markup, and help needs no Rich
    invoke_without_command=True,
)
app.command("start")(daemon.start)
app.command("stop")(daemon.stop)
app.command("restart")(daemon.restart)
app.command("status")(status.status)
app.command("ps", help="The same as `status`.")(status.status)
app.command("models")(models.models)
app.command("load")(models.load)
app.command("unload")(models.unload)
app.command("pin")(models.pin)
app.command("unpin")(models.unpin)
app.command("limit")(limit.limit)
app.command("run")(run.run)
app.command("requests")(requests.requests)
app.command("abort")(requests.abort)
app.command("logs")(logs.logs)
app.command("init")(manifest.init)
app.command("check")(manifest.check)
app.command("demo")(demo.demo)


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


@app.callback()
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
    command = typer.main.get_command(app)
    if "_OMLXD_COMPLETE" in os.environ:
        command.main(arguments, prog_name="omlxd")
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
    output.report(
        OmlxError(
            f"something inside omlxd failed: {type(error).__name__}: {error}",
            hint="`omlxd --debug ...` shows where; please report it",
        )
    )
    return OmlxError.exit_status


def _wants_traceback(arguments: Sequence[str]) -> bool:
    """`--debug` stands before the command, so it counts even when parsing did not come that far."""
    for argument in arguments:
        if argument == "--debug":
            return True
        if not argument.startswith("-"):
            return False
    return False


def _reader_left() -> int:
    """The reader of our pipe has seen enough: no error, and no complaint from Python's flush at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
