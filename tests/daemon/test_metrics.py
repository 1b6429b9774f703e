"""`/metrics`: what it tells, counted from real requests, and that the manual names all of it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from omlxd.core.histogram import Histogram
from tests.fakes.daemon import RunningDaemon, running
from tests.fakes.engine import FakeEngine
from tests.fakes.wire import fetch

MODELS = {"chat": {"mib": 60}, "small": {"mib": 60}}
HELLO = [{"role": "user", "content": "hello there"}]
PAGE = (Path(__file__).parents[2] / "man" / "omlxd-api.7").read_text()


async def told(daemon: RunningDaemon) -> dict[str, float]:
    """`name{label="value",...}` to its value."""
    answer = await daemon.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


async def chat(daemon: RunningDaemon, model: str, **more: object) -> int:
    body = {"model": model, "messages": HELLO, **more}
    return (await daemon.ask("POST", "/v1/chat/completions", body)).status


async def test_requests_tokens_loads_and_decisions_are_counted(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon:
        assert [await chat(daemon, "chat"), await chat(daemon, "chat"), await chat(daemon, "small")] == [200] * 3
        assert await chat(daemon, "chat", logit_bias={"1001": 1}) == 400
        samples = await told(daemon)
        assert samples["omlxd_requests_total{end=finished,model=chat}"] == 2
        assert samples["omlxd_tokens_total{kind=generated,model=chat}"] == 16
        assert samples["omlxd_tokens_total{kind=prompt,model=small}"] == 3
        assert samples["omlxd_loads_total{end=finished,model=small}"] == 1
        assert samples["omlxd_decisions_total{action=unload,trigger=load}"] >= 1
        assert samples["omlxd_decision_seconds_count{}"] >= 1
        assert samples["omlxd_first_token_seconds_count{}"] == 3
        assert samples["omlxd_step_seconds_count{}"] > 16


async def test_the_present_state_is_told_by_model(tmp_path: Path) -> None:
    engine = FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002)
    async with running(tmp_path, MODELS, engine=engine) as daemon:
        asked = asyncio.create_task(chat(daemon, "chat", max_tokens=10**6))
        async with asyncio.timeout(20):
            while (samples := await told(daemon)).get("omlxd_tokens_total{kind=generated,model=chat}", 0) < 3:
                pass
        assert samples["omlxd_model_state{model=chat,state=loaded}"] == 1
        assert samples["omlxd_model_state{model=small,state=loaded}"] == 0
        assert samples["omlxd_model_bytes{kind=weights,model=chat}"] == 60 * 2**20
        assert samples["omlxd_model_requests{model=chat,state=running}"] == 1
        assert samples["omlxd_memory_bytes{kind=active}"] > 60 * 2**20
        assert samples["omlxd_limit_bytes{kind=soft}"] == 100 * 2**20
        assert samples["omlxd_level{level=ok}"] == 1
        await daemon.control("POST", "models/chat/unload", {"now": True})
        assert await asked == 503
        assert (await told(daemon))["omlxd_requests_total{end=aborted,model=chat}"] == 1


async def test_tcp_wants_the_key_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, api={"api_key": "sesame-open-now"}) as daemon:
        assert (await fetch(daemon.tcp, "GET", "/metrics")).status == 401
        headers = {"authorization": "Bearer sesame-open-now"}
        assert (await fetch(daemon.tcp, "GET", "/metrics", headers=headers)).status == 200


async def test_every_metric_is_on_the_page_and_no_other(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon:
        text = (await daemon.ask("GET", "/metrics")).body.decode()
    names = {re.sub("_(total|info)$", "", name) for name in re.findall(r"^# TYPE (\S+)", text, re.M)}
    assert set(re.findall(r"^\.It Ic (omlxd\w*)$", PAGE, re.M)) == names


def test_the_library_is_imported_only_when_it_is_asked_for() -> None:
    code = "import sys, omlxd.daemon.doors; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@given(st.lists(st.floats(0, 100), max_size=30))
def test_a_histogram_counts_each_value_once_in_its_class(values: list[float]) -> None:
    histogram = Histogram((1.0, 10.0, 50.0))
    for value in values:
        histogram.add(value)
    expected = [(str(bound), sum(value <= bound for value in values)) for bound in (1.0, 10.0, 50.0)]
    assert histogram.cumulative() == [*expected, ("+Inf", len(values))]
    assert histogram.total == sum(values)
