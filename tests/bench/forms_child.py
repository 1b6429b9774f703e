"""The figures of `tests.bench.forms` in a fresh process: `python -m tests.bench.forms_child MODEL ROUNDS`; JSON."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlxd.core.answer_form import AnswerForm
from omlxd.engine.codec import TextCodec
from omlxd.engine.events import EngineEvent, Finished, Generated, LoadDone
from omlxd.engine.orders import GenerationOrder, LoadOrder, Plan, Sampling
from omlxd.engine.thread import EngineThread

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 200}
TEXT = '{"name": "a quick brown fox jumped over it", "age": 42, "tags": ["one", "two and", "three or four"]}'
TOKENS = 40


def main(model: Path, rounds: int) -> dict[str, Any]:
    """All figures by name."""
    news: queue.SimpleQueue[tuple[float, EngineEvent]] = queue.SimpleQueue()
    engine = EngineThread()
    engine.start(lambda events: [news.put((time.perf_counter(), event)) for event in events])
    plan = Plan(resident=frozenset({"m"}), load=LoadOrder(1, "m", str(model)))
    engine.apply(plan)
    while not isinstance(news.get(timeout=300)[1], LoadDone):
        pass
    codec = engine.codec("m")
    assert codec is not None
    found = _grammar(codec)

    def decode(rows: int, form: AnswerForm | None, number: int) -> float:
        """Milliseconds of a step of so many requests."""
        constraint = None if form is None else codec.constrain(form, (1,), is_chat=False)
        orders = {
            name: GenerationOrder(
                name, "m", (5, 6, 7), TOKENS, Sampling(temperature=1.0, seed=row), constraint=constraint
            )
            for row in range(rows)
            for name in [f"{number}.{row}"]
        }
        engine.apply(Plan(resident=frozenset({"m"}), requests=orders, seen_seq=2**40))
        times, ended = [], 0
        while ended < rows:
            at_s, event = news.get(timeout=300)
            ended += isinstance(event, Finished)
            if isinstance(event, Generated) and event.request == f"{number}.0":
                times.append(at_s)
        return 1000 * (times[-1] - times[1]) / (len(times) - 2)

    number = 0
    for rows in (1, 8):
        for key in (f"held_{rows}", f"free_{rows}"):
            found[key] = []
        for _ in range(rounds):
            for key, form in ((f"held_{rows}", AnswerForm(json.dumps(LONG))), (f"free_{rows}", None)):
                number += 1
                found[key].append(decode(rows, form, number))
    engine.close()
    return found


def _grammar(codec: TextCodec) -> dict[str, Any]:
    import mlx.core as mx
    import psutil

    process = psutil.Process()
    before = process.memory_info().rss
    tree_s = _timed(lambda: codec.constrain(AnswerForm('{"type":"null"}'), (1,), is_chat=False))
    found: dict[str, Any] = {"tree_ms": 1000 * tree_s, "tree_mb": (process.memory_info().rss - before) / 1e6}
    schemas = [{**SCHEMA, "title": str(number)} for number in range(5)]
    found["grammar_ms"] = [
        1000 * _timed(lambda: codec.constrain(AnswerForm(json.dumps(schema)), (1,), is_chat=False))  # noqa: B023
        for schema in schemas
    ]
    constraint = codec.constrain(AnswerForm(json.dumps(SCHEMA)), (1,), is_chat=False)
    assert constraint is not None
    found |= {"mask_us": [], "take_us": [], "apply_us": []}
    logits = mx.random.normal((1, codec.vocab_size))
    mx.eval(logits)
    for _ in range(3):
        guide = constraint.begin(())
        for position, token in enumerate(codec.encode_text(TEXT)):
            began_s = time.perf_counter()
            allowed = guide.allowed(codec.vocab_size)
            masked_s = time.perf_counter()
            mx.eval(mx.where(mx.array(allowed), logits, -mx.inf))
            applied_s = time.perf_counter()
            guide.take(position, token)
            found["take_us"].append(1e6 * (time.perf_counter() - applied_s))
            found["mask_us"].append(1e6 * (masked_s - began_s))
            found["apply_us"].append(1e6 * (applied_s - masked_s))
        assert guide.is_complete
    mx.clear_streams()
    return found


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
