"""`omlxd run MODEL` on a terminal: a chat that outlives refused questions, stopped answers and a restarted daemon."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from omlxd.cli import output
from omlxd.cli.answer import Answer, AnswerWriter, stats_text, stream_answer
from omlxd.cli.chat_prompt import Prompt, unechoed
from omlxd.cli.client import Client
from omlxd.cli.conversation import Conversation, entered
from omlxd.cli.known_models import known_names
from omlxd.cli.models import load_with_progress
from omlxd.cli.values import amount
from omlxd.core.errors import ContextExceeded, OmlxError, PrefillMemoryExceeded
from omlxd.core.units import format_bytes
from omlxd.core.wording import nearest, shown
from omlxd.daemon.home import Home

LEAVE: Final = frozenset({"exit", "quit", "bye"})
_NEARLY_FULL: Final = 0.9
_TOO_LONG: Final = (ContextExceeded, PrefillMemoryExceeded)


@dataclass(frozen=True, slots=True)
class Command:
    """What a line that begins with `/` does; `run` takes the text after the name."""

    usage: str
    help: str
    run: Callable[[Chat, str], None]


class Chat:
    """A conversation with a model, which may change on the way.

    Args:
        client: for the daemon.
        home: where what was typed is kept.
        model: a name or alias.
        settings: further fields of each request, as `temperature`.
        system: the system message, or None.
        stats: whether each answer is followed by its figures.
    """

    def __init__(
        self,
        client: Client,
        home: Home,
        model: str,
        settings: Mapping[str, Any],
        *,
        system: str | None = None,
        stats: bool = False,
    ) -> None:
        self._client, self._home, self._settings, self._stats = client, home, settings, stats
        self._conversation = Conversation(system)
        self._view: Mapping[str, Any] = {"name": model}
        self._last: Answer | None = None
        self._question: str | None = None

    def talk(self) -> None:
        """Load the model and talk until the user leaves; raises what the load raises, for nothing is lost yet."""
        self._take(str(self._view["name"]))
        prompt = Prompt(self._home, self._completions)
        with _ended_by_signals(prompt):
            output.note("/help lists commands; Ctrl-D leaves")
            while True:
                try:
                    text = prompt.read()
                except EOFError:
                    return
                except KeyboardInterrupt as interrupted:
                    if not interrupted.args[0]:
                        output.note("Ctrl-D or /exit leaves")
                    continue
                if not self._understood(entered(text)):
                    return

    def _understood(self, text: str) -> bool:
        """Do what was typed; False when it was to leave. Whatever goes wrong with it, the chat goes on."""
        try:
            if text.startswith("/") and not text.startswith("//"):
                return self._command(text)
            if text:
                self._ask(text.removeprefix("/"))
        except KeyboardInterrupt:
            output.note("stopped")
        except OmlxError as error:
            output.report(error)
        return True

    def _command(self, text: str) -> bool:
        name, _, argument = text[1:].partition(" ")
        if name in LEAVE:
            return False
        command = COMMANDS.get(name)
        if command is None:
            near = nearest(name, [*COMMANDS, *LEAVE])
            hint = f"did you mean `/{near}`?" if near else "`/help` lists them."
            output.note(f"there is no command `/{shown(name)}`; {hint} A question that begins with / is typed with //")
        else:
            command.run(self, argument.strip())
        return True

    def _ask(self, question: str) -> None:
        """Ask, write the answer and remember both; a stopped answer counts as far as it came."""
        self._question = question
        answer = Answer(self._view["name"])
        body = {"model": answer.model, "messages": self._conversation.messages(question), "stream": True}
        try:
            with unechoed():
                stream_answer(self._client, body | dict(self._settings), answer, AnswerWriter())
        except KeyboardInterrupt:
            output.note("stopped" if answer.text else "stopped; nothing of it is remembered")
        except _TOO_LONG as error:
            output.report(type(error)(error.message, hint=self._way_out(), details=error.details))
            return
        except OmlxError as error:
            output.report(error)
            output.note("the conversation is kept; `/retry` asks again")
            return
        self._last = answer
        if answer.text:
            self._conversation.add(question, answer.text)
        self._tell_end(answer)
        if self._stats and answer.figures:
            output.note(stats_text(answer, self._client))

    def _tell_end(self, answer: Answer) -> None:
        """Why an answer ended before its end, and how full the context is."""
        length = self._view.get("context_length")
        used = (answer.figures.get("prompt_tokens") or 0) + (answer.figures.get("generated_tokens") or 0)
        if answer.finish_reason == "length" and length and used >= length:
            output.note(f"the context is full ({used} of {length} tokens): {self._way_out()}")
        elif answer.finish_reason == "length":
            tokens = answer.figures.get("generated_tokens")
            output.note(f"the answer was cut off after {tokens} tokens; `--max-tokens` allows more")
        elif length and used > _NEARLY_FULL * length:
            output.note(f"the context is nearly full ({used} of {length} tokens): {self._way_out()}")

    def _way_out(self) -> str:
        if not self._conversation.exchanges:
            return "shorten the question"
        return "`/forget` drops the older half of the conversation, `/clear` all of it; `/retry` asks again"

    def _take(self, name: str) -> None:
        """Load a model and talk to it from now on."""
        try:
            self._view = view = load_with_progress(self._client, name)["model"]
        except KeyboardInterrupt:
            output.note(f"the load goes on; `omlxd unload {name}` cancels it")
            raise
        size = format_bytes(view["weights_bytes"]) if view.get("weights_bytes") else "size unknown"
        context = f", context {view['context_length']} tokens" if view.get("context_length") else ""
        output.note(f"talking to `{view['name']}` ({size}{context})")

    def _completions(self, before: str) -> Iterable[str]:
        """Commands, and the models after `/model`."""
        if before.startswith("/model "):
            word = before.removeprefix("/model ").lstrip()
            return (name for name in known_names(self._home) if name.startswith(word))
        if not before.startswith("/") or " " in before:
            return ()
        return (f"/{name}" for name in sorted([*COMMANDS, "exit"]) if name.startswith(before[1:]))

    # The commands.

    def help(self, argument: str) -> None:
        """List the commands and keys."""
        width = max(len(command.usage) for command in COMMANDS.values()) + 2
        for command in COMMANDS.values():
            output.data(f"{command.usage:<{width}}{command.help}")
        output.data(f"{'/exit, Ctrl-D':<{width}}leave")
        output.data(f"{'Ctrl-C':<{width}}stop the answer, or drop what was typed")
        output.data(f"{'Alt-Enter':<{width}}another line; so do a \\ at the end, and triple quotes")

    def model(self, argument: str) -> None:
        """List the models, or go on with another."""
        if argument:
            self._take(argument)
            return
        for view in self._client.get("/v1/control/models")["models"]:
            mark = "*" if view["name"] == self._view["name"] else " "
            also = f" ({', '.join(view['aliases'])})" if view["aliases"] else ""
            output.data(f"{mark} {shown(view['name'])}{shown(also)}: {view['state']}")

    def system(self, argument: str) -> None:
        """Show, set or remove the system message."""
        if not argument:
            output.data(self._conversation.system or "there is no system message; `/system TEXT` sets one")
            return
        self._conversation.system = None if argument == "-" else argument
        output.note("the system message is removed" if argument == "-" else "the next answer follows it")

    def clear(self, argument: str) -> None:
        """Begin anew."""
        self._conversation.clear()
        output.note(
            "the conversation is forgotten" + ("; the system message stays" if self._conversation.system else "")
        )

    def forget(self, argument: str) -> None:
        """Drop the older half."""
        if not self._conversation.exchanges:
            output.note("there is nothing to forget")
            return
        dropped = self._conversation.forget()
        left = len(self._conversation.exchanges)
        output.note(f"{dropped} of {dropped + left} questions and their answers are forgotten")

    def retry(self, argument: str) -> None:
        """Ask the last question again; a new answer takes the place of the one that it had."""
        if self._question is None:
            output.note("nothing has been asked yet")
            return
        exchanges = self._conversation.exchanges
        replaced = [exchanges.pop()] if exchanges and exchanges[-1][0] == self._question else []
        kept = len(exchanges)
        self._ask(self._question)
        if len(exchanges) == kept:
            exchanges += replaced

    def stats(self, argument: str) -> None:
        """Tell the figures of the last answer, and how long the conversation is."""
        if self._last is None:
            output.note("nothing has been answered yet")
            return
        output.sentence(stats_text(self._last, self._client))
        figures, length = self._last.figures, self._view.get("context_length")
        used = (figures.get("prompt_tokens") or 0) + (figures.get("generated_tokens") or 0)
        of = f" of {length}" if length else ""
        questions = amount(len(self._conversation.exchanges), "question")
        output.sentence(f"{questions} so far, {used}{of} tokens of context")


COMMANDS: Final = {
    "model": Command("/model [NAME]", "list the models, or go on with another", Chat.model),
    "system": Command("/system [TEXT]", "show or set the system message; `-` removes it", Chat.system),
    "clear": Command("/clear", "forget the conversation", Chat.clear),
    "forget": Command("/forget", "forget the older half of it, when the context is full", Chat.forget),
    "retry": Command("/retry", "ask the last question again", Chat.retry),
    "stats": Command("/stats", "speed, first token and memory of the last answer", Chat.stats),
    "help": Command("/help", "this list", Chat.help),
}


@contextmanager
def _ended_by_signals(prompt: Prompt) -> Iterator[None]:
    """SIGTERM and SIGHUP end the chat as leaving does, so that the terminal is as it was before."""

    def end(number: int, frame: object) -> None:
        prompt.leave(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
