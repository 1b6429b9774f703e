"""A page of a list, as Anthropic's clients ask for one; who asks for none, as OpenAI's do, gets all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omlxd.core.errors import InvalidRequest

QUERY: Final = ("limit", "after_id", "before_id")
MOST: Final = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list: the `limit` entries behind or before one of an id, from the beginning without any."""

    limit: int | None = None
    after_id: str | None = None
    before_id: str | None = None

    @classmethod
    def asked(cls, query: Mapping[str, str]) -> Page:
        """The page that a query asks for; raises InvalidRequest, with the parameter in `details["param"]`."""
        limit = query.get("limit")
        if limit is not None and not (re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= MOST):
            raise _wrong("limit", f"must be a whole number from 1 to {MOST}")
        if query.keys() >= {"after_id", "before_id"}:
            raise _wrong("before_id", "cannot be asked for together with `after_id`")
        return cls(None if limit is None else int(limit), query.get("after_id"), query.get("before_id"))

    def of(self, listed: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The page: `data`, whether there is more in its direction, and its first and last id."""
        ids = [each["id"] for each in listed]
        most = len(ids) if self.limit is None else self.limit
        if self.before_id is not None:
            end = _place(ids, "before_id", self.before_id)
            begin = max(0, end - most)
            has_more = begin > 0
        else:
            begin = 0 if self.after_id is None else _place(ids, "after_id", self.after_id) + 1
            end = min(len(ids), begin + most)
            has_more = end < len(ids)
        data = list(listed[begin:end])
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": has_more, "first_id": first, "last_id": last}


def _place(ids: Sequence[str], param: str, wanted: str) -> int:
    if wanted not in ids:
        raise _wrong(param, "is not the id of a model here")
    return ids.index(wanted)


def _wrong(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"`{param}`: {what}", hint="correct it, or leave it out", details={"param": param})
