"""What a chat remembers: who said what, as the messages of the next request; pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Conversation:
    """A system message and the exchanges so far, each a question with its answer.

    Attributes:
        system: what the model is told to be, or None.
        exchanges: questions and their answers; every question has one, so that roles take turns.
    """

    system: str | None = None
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """The messages that ask this question."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.exchanges:
            found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*found, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Remember an exchange."""
        self.exchanges.append((question, answer))

    def forget(self) -> int:
        """Drop the older half of the exchanges, at least one; how many those were."""
        dropped = (len(self.exchanges) + 1) // 2
        del self.exchanges[:dropped]
        return dropped

    def clear(self) -> None:
        """Drop all exchanges; the system message stays."""
        self.exchanges.clear()


def is_complete(text: str) -> bool:
    """Whether Enter sends what was typed, or begins another line: after a backslash, and within triple quotes."""
    if text.lstrip().startswith('"""'):
        inner = text.strip()[3:]
        return inner.endswith('"""')
    return not text.endswith("\\")


def entered(text: str) -> str:
    """The question in what was typed: without the triple quotes around it, and blanks."""
    text = text.strip()
    if text.startswith('"""') and len(text) >= 6 and text.endswith('"""'):
        return text[3:-3].strip()
    return text
