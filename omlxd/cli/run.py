"""`omlxd run`: one prompt, its answer streamed as it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.invocation import client_of
from omlxd.cli.options import Json, Model
from omlxd.core.errors import InvalidRequest


def run(
    context: typer.Context,
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; `-` or a pipe: standard input.")
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
    json: Json = False,
) -> None:
    """Ask a model, loading it when needed."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": _prompt_text(model, prompt)})
    chosen = {"max_tokens": max_tokens, "top_p": top_p, "seed": seed, "stop": stop or None}
    body = {"model": model, "messages": messages, "temperature": temperature, "stream": True}
    body |= {key: value for key, value in chosen.items() if value is not None}
    answer = Answer(model)
    stream_answer(client_of(context), body, answer, write=_keep_quiet if json else _write)
    if json:
        output.data_json(answer.to_json())


@dataclass(slots=True)
class Answer:
    """What came back, growing while it streams."""

    model: str
    text: str = ""
    finish_reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The schema of `run --json`; seconds as floats."""
        from omlxd.core.states import SCHEMA  # 8 ms of dataclasses that streaming does not need

        keys = ("prompt_tokens", "generated_tokens", "first_token_s", "tokens_per_s")
        head = {"schema": SCHEMA, "model": self.model, "text": self.text, "finish_reason": self.finish_reason}
        return head | {key: self.figures.get(key) for key in keys}


def stream_answer(client: Client, body: dict[str, Any], answer: Answer, *, write: Callable[[str], None]) -> None:
    """Fill `answer` and write its text as it comes; ends the line also when the answer breaks off."""
    events = client.sse("/v1/chat/completions", body)
    with closing(events), output.Progress() as progress:  # closing the connection aborts the request
        try:
            for event in events:
                if isinstance(event, str):
                    if not answer.text:
                        progress.show(event)
                    continue
                choice = event["choices"][0]
                piece = choice["delta"].get("content") or ""
                if piece:
                    progress.clear()
                    answer.text += piece
                    write(piece)
                answer.model = event.get("model", answer.model)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                answer.figures |= event.get("omlxd") or {}
        finally:
            if answer.text and not answer.text.endswith("\n"):
                write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _keep_quiet(text: str) -> None:
    """`--json` prints the whole answer at the end."""


def _prompt_text(model: str, prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        if not prompt:
            raise InvalidRequest("the prompt is empty", hint=f'`omlxd run {model} "Why is the sky blue?"`')
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest("there is no prompt", hint=f'`omlxd run {model} "Why is the sky blue?"`, or pipe one in')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {error.start})", hint="convert it, for example with `iconv`"
        ) from error
    if not text.strip():
        raise InvalidRequest("the prompt on standard input is empty", hint=f'`omlxd run {model} "..."`')
    return text
