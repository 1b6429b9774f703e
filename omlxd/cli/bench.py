"""`omlxd bench`: how fast a model is on this machine, and what it takes of memory beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.invocation import client_of
from omlxd.cli.options import Json, Model
from omlxd.core.errors import DoesNotFit, InvalidRequest, UnknownModel

if TYPE_CHECKING:
    from omlxd.cli.bench_figures import Memory, Speed
    from omlxd.cli.bench_report import Report
    from omlxd.cli.bench_session import Session
    from omlxd.cli.client import Client

PROMPT_TOKENS: Final = 512
GENERATE_TOKENS: Final = 128
STREAMS: Final = (1, 4)
_ONE_MORE: Final = 1  # token that a prompt of `--context` is answered with


def bench(
    context: typer.Context,
    model: Model,
    prompt: Annotated[
        int | None, typer.Option("--prompt", metavar="N", min=2, help="Tokens of each prompt; default 512.")
    ] = None,
    generate: Annotated[
        int | None, typer.Option("--generate", metavar="N", min=1, help="Tokens of each answer; default 128.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Rounds that count.")] = 3,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="N,...", help="Requests at the same time; default 1,4.")
    ] = None,
    contexts: Annotated[
        str | None, typer.Option("--context", metavar="N,...", help="Measure memory with prompts so long, too.")
    ] = None,
    reload: Annotated[bool, typer.Option("--reload", help="Load it anew although it is loaded.")] = False,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="FILE", readable=False, help="Ratios to what `--json` wrote before."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure speed, load time and memory of a model."""
    from omlxd.cli.bench_compare import read_report
    from omlxd.cli.bench_report import Report
    from omlxd.cli.bench_session import made_ready

    wanted = _numbers(concurrency, "--concurrency") if concurrency is not None else None
    lengths = _numbers(contexts, "--context") if contexts is not None else ()
    earlier = read_report(compare) if compare is not None else None
    client = client_of(context)
    status = client.get("/v1/control/status")
    name, sizes = _checked(client, model, prompt, generate, wanted, lengths)
    with made_ready(client, name, status["pid"], reload=reload) as session:
        report = Report.begin(session, status["version"], sizes.prompt, sizes.generate, rounds)
        for streams in sizes.streams:
            speed, memory = _measure(session, report, streams)
            report.speeds.append(speed)
            report.memory += memory
        for tokens in lengths:
            report.memory += _measure_prompt(session, report, tokens)
        report.backend = client.get("/v1/control/status")["backend"]
    _tell(report, earlier, compare, json=json)


def _measure(session: Session, report: Report, streams: int) -> tuple[Speed, list[Memory]]:
    """One round to warm up, from which the memory is known, and those that count."""
    from omlxd.cli.bench_figures import Speed, decode_memory, prompt_memory

    def ask(what: str) -> Any:
        many = "1 stream" if streams == 1 else f"{streams} streams"
        return session.ask(report.prompt_tokens, report.generate_tokens, streams, f"{many}, {what}")

    first = ask("warming up")
    counted = [ask(f"round {number + 1} of {report.rounds}") for number in range(report.rounds)]
    tokens = report.prompt_tokens + report.generate_tokens
    memory = prompt_memory(first.streams[0], report.weights) if streams == 1 else []
    memory += decode_memory(first, session.plan(tokens, streams))
    return Speed(streams, tuple(counted)), memory


def _measure_prompt(session: Session, report: Report, tokens: int) -> list[Memory]:
    from omlxd.cli.bench_figures import prompt_memory

    asked = session.ask(tokens, _ONE_MORE, 1, f"a prompt of {tokens} tokens")
    report.beside(asked.meanwhile)
    return prompt_memory(asked.streams[0], report.weights)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How long prompts and answers are, in tokens, and how many run at a time."""

    prompt: int
    generate: int
    streams: tuple[int, ...]


def _checked(
    client: Client,
    model: str,
    prompt: int | None,
    generate: int | None,
    wanted: Sequence[int] | None,
    lengths: Sequence[int],
) -> tuple[str, _Sizes]:
    """The model's own name, and what it can be measured with; what cannot fit is told before anything is loaded."""
    from omlxd.cli.bench_session import plan

    try:
        found = plan(client, model, None, 1)
    except UnknownModel as error:
        if not Path(model).expanduser().is_dir():
            raise
        raise UnknownModel(
            f"`{model}` is a folder, and not a model of the manifest", hint=f"`omlxd add NAME {model}` makes it one"
        ) from error
    name, most = found["names"][0], found["context"]  # 4096, or less where the model has no longer one
    if prompt is None and generate is None and most < PROMPT_TOKENS + GENERATE_TOKENS:
        prompt, generate = most * 3 // 4, most - most * 3 // 4
    prompt, generate = prompt or PROMPT_TOKENS, generate or GENERATE_TOKENS
    for tokens in lengths:
        with _in_its_context(f"a prompt of {tokens} tokens and one more", "`--context {}`", _ONE_MORE):
            verdict = plan(client, name, tokens + _ONE_MORE, 1)
        _must_fit(verdict, f"--context {tokens}")
    both, streams = f"a prompt of {prompt} and an answer of {generate} tokens", []
    for each in wanted or STREAMS:
        try:
            with _in_its_context(both, "`--prompt` and `--generate`: {} together"):
                verdict = plan(client, name, prompt + generate, each)
            _must_fit(verdict, f"--concurrency {each}")
        except (DoesNotFit, InvalidRequest) as error:
            if wanted is not None or each == 1:
                raise
            output.note(f"{each} streams are left out: {error.message}")
        else:
            streams.append(each)
    return name, _Sizes(prompt, generate, tuple(streams))


@contextmanager
def _in_its_context(what: str, hint: str, own_tokens: int = 0) -> Iterator[None]:
    """Say in the words of this command what is longer than the model's context, of which it needs some itself."""
    try:
        yield
    except InvalidRequest as error:
        longest = error.details.get("context_length")
        if longest is None:
            raise
        message = f"{what} are more than the model's context of {longest} tokens"
        raise InvalidRequest(message, hint=hint.format(longest - own_tokens)) from error


def _must_fit(verdict: dict[str, Any], option: str) -> None:
    if verdict["fits"]:
        return
    hint = "raise the limit (`omlxd limit`), or unload what is in the way"
    if verdict["max_context"]:
        hint = f"prompts and answers of {verdict['max_context']} tokens together would fit: `--prompt`, `--generate`"
        if option.startswith("--context"):
            hint = f"`--context {verdict['max_context'] - _ONE_MORE}` would fit"
    raise DoesNotFit(verdict["why"], hint=hint, details={"short_bytes": verdict["short_bytes"]})


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, each once, in the order they are written."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < len(part) < 10 and int(part) for part in parts):
        raise InvalidRequest(f"`{option}` takes whole numbers above 0 with commas between them", hint=f"`{option} 1,4`")
    numbers = tuple(dict.fromkeys(int(part) for part in parts))
    if option == "--context" and min(numbers) < 2:
        raise InvalidRequest("a prompt of `--context` has at least 2 tokens", hint="`--context 1024,4096`")
    return numbers


def _tell(report: Report, earlier: dict[str, Any] | None, file: Path | None, *, json: bool) -> None:
    from omlxd.cli.bench_compare import compared

    ratios = compared(report, earlier) if earlier is not None else None
    for warning in (ratios or {}).get("differences", ()):
        output.warn(f"`{file}` was measured with other settings: {warning}")
    for disturbance in report.disturbances:
        output.warn(f"the figures are not to be trusted: {disturbance} meanwhile")
    if json:
        output.data_json(report.to_json() | ({"compared": ratios} if ratios is not None else {}))
        return
    from omlxd.cli.bench_table import draw_report  # Rich, only where a table is drawn

    draw_report(report, ratios)
