"""`omlxd run`: one prompt and its answer streamed as it is made, or a chat."""

from __future__ import annotations

import os
import select
import stat
import sys
from typing import Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.answer import Answer, AnswerWriter, stats_text, stream_answer
from omlxd.cli.invocation import client_of, home_of
from omlxd.cli.options import Json, Model
from omlxd.core.errors import InvalidRequest

_SILENCE_S: Final = 2.0


def run(
    context: typer.Context,
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt; it follows what is piped in. `-`: standard input alone."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from this much probability only.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Then show tokens/s, first token and memory.")] = False,
    json: Json = False,
) -> None:
    """Ask a model, loading it when needed; without a prompt, chat."""
    chosen = {"max_tokens": max_tokens, "top_p": top_p, "seed": seed, "stop": stop or None}
    settings: dict[str, Any] = {"temperature": temperature}
    settings |= {key: value for key, value in chosen.items() if value is not None}
    client = client_of(context)
    if prompt is None and _is_terminal_chat(json):
        from omlxd.cli.chat import Chat

        Chat(client, home_of(context), model, settings, system=system, stats=stats).talk()
        return
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": _prompt_text(model, prompt)})
    answer = Answer(model)
    body = {"model": model, "messages": messages, **settings, "stream": True}
    stream_answer(client, body, answer, AnswerWriter(quiet=json))
    if json:
        output.data_json(answer.to_json())
    if stats:
        output.note(stats_text(answer, client))


def _is_terminal_chat(json: bool) -> bool:
    return not json and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _prompt_text(model: str, prompt: str | None) -> str:
    """The prompt: what is piped in, then what was typed; so that questions about one text begin the same way."""
    if prompt == "":
        raise InvalidRequest("the prompt is empty", hint=f'`omlxd run {model} "Why is the sky blue?"`')
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InvalidRequest(
            "there is no prompt, and a chat needs a terminal for its answers too",
            hint=f'`omlxd run {model} "Why is the sky blue?"`, or pipe one in',
        )
    if prompt is not None and prompt != "-":
        piped = _piped_text() if _is_piped() else ""
        return f"{piped.rstrip()}\n\n{prompt}" if piped.strip() else prompt
    text = _piped_text()
    if not text.strip():
        raise InvalidRequest("the prompt on standard input is empty", hint=f'`omlxd run {model} "..."`')
    return text


def _is_piped() -> bool:
    """Whether standard input is a pipe, a socket or a file; a terminal, /dev/null or nothing at all is not read."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _piped_text() -> str:
    """All of standard input; what nobody writes to and nobody closes, as under ssh, is not waited for in silence."""
    if not sys.stdin.isatty() and not select.select([sys.stdin], [], [], _SILENCE_S)[0]:
        output.note("waiting for standard input to end; `< /dev/null` leaves it alone")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {error.start})", hint="convert it, for example with `iconv`"
        ) from error
