"""omlxd(1) as claims: the entries of a section, and what shows each of them true."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "man" / "omlxd.1"

Check = Callable[..., None]


def entries(section: str) -> list[str]:
    """What the section lists, each by itself: `.It Dv SIGTERM , Dv SIGINT` is two."""
    text = PAGE.read_text().partition(f".Sh {section}\n")[2].partition("\n.Sh ")[0]
    items = re.findall(r"^\.It (.+)$", text, re.M)
    return [re.sub(r"^(?:Pa|Dv) ", "", entry) for item in items for entry in item.split(" , ")]


class Shown:
    """The checks of one section; an entry without one is a failure, and so is one without an entry.

    Args:
        section: its title.
    """

    def __init__(self, section: str) -> None:
        self.section = section
        self.checks: dict[str, Check] = {}

    def by(self, *names: str) -> Callable[[Check], Check]:
        """Decorates what shows these entries true."""

        def register(check: Check) -> Check:
            assert not self.checks.keys() & set(names), f"{names} is checked twice"
            self.checks |= dict.fromkeys(names, check)
            return check

        return register

    def show(self, entry: str, *arguments: Any) -> None:
        """Run the entry's check."""
        assert entry in self.checks, f"omlxd(1), {self.section}: nothing shows that `{entry}` is true; add a check"
        self.checks[entry](*arguments)

    def require_entries(self) -> None:
        """Nothing is checked that the page does not say."""
        assert not self.checks.keys() - set(entries(self.section))
