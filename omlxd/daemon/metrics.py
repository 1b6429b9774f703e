"""`/metrics` for Prometheus: the state as it is now, and what was counted since the start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omlxd.core.histogram import Histogram
from omlxd.core.states import EntryState, Level, StatusView
from omlxd.daemon.app import Daemon

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

METRICS_PATH = "/metrics"
_MEMORY = ("used", "active", "cache", "footprint", "base", "peak", "committed", "unaccounted", "prefix_cache")


def routes(daemon: Daemon) -> list[Route]:
    """The route of both doors."""

    async def answer(request: Request) -> Response:
        gathered = _Gathered(daemon)
        text = await asyncio.to_thread(_written, gathered)
        return Response(text, media_type="text/plain; version=0.0.4")

    return [Route(METRICS_PATH, answer, methods=["GET"])]


class _Gathered:
    """What is told, read on the loop's thread; a Prometheus collector writes it on another."""

    def __init__(self, daemon: Daemon) -> None:
        tallies = daemon.tallies
        self._status: StatusView = daemon.status()
        self._requests, self._loads = dict(tallies.requests), dict(tallies.loads)
        self._waits, self._parks = dict(tallies.waits), dict(tallies.parks)
        self._decisions = dict(tallies.decisions)
        prompt, generated = tallies.prompt_tokens.copy(), tallies.generated_tokens.copy()
        for each in daemon.pool.generations:  # what has been made so far counts before its request has ended
            prompt[each.model] += each.prompt_tokens
            generated[each.model] += each.generated_tokens
        self._tokens = {(model, "prompt"): count for model, count in prompt.items()}
        self._tokens |= {(model, "generated"): count for model, count in generated.items()}
        self._times = {
            "first_token": ("From a request to its first token", _snapshot(tallies.first_token_s)),
            "decision": ("From a decision until memory was read again", _snapshot(tallies.decision_s)),
            "step": ("One step of the engine", _snapshot(daemon.pool.engine.step_times())),
        }

    def collect(self) -> Iterator[Metric]:
        """All metrics, in the order of the manual page."""
        yield from self._about_memory()
        yield from self._about_models()
        yield from self._counted()
        yield from self._timed()

    def _about_memory(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        status, memory = self._status, self._status.memory
        about = {"version": status.version, "backend": status.backend or "none", "policy": status.enforcer.policy}
        yield InfoMetricFamily("omlxd", "The daemon", about)
        yield GaugeMetricFamily("omlxd_uptime_seconds", "Since the start", status.uptime_s)
        held = GaugeMetricFamily("omlxd_memory_bytes", "Memory by kind", labels=["kind"])
        for kind in _MEMORY:
            held.add_metric([kind], getattr(memory, kind))
        yield held
        limits = GaugeMetricFamily("omlxd_limit_bytes", "The limits in force", labels=["kind"])
        limits.add_metric(["soft"], memory.soft_limit)
        limits.add_metric(["hard"], memory.hard_limit)
        yield limits
        level = GaugeMetricFamily("omlxd_level", "1 for the enforcer's level", labels=["level"])
        for each in Level:
            level.add_metric([each.value], each is status.enforcer.level)
        yield level
        samples = CounterMetricFamily("omlxd_samples", "Looks at memory inside steps", labels=["seen"])
        samples.add_metric(["over_hard"], memory.over_hard_samples)
        samples.add_metric(["within"], memory.samples - memory.over_hard_samples)
        yield samples
        yield GaugeMetricFamily(
            "omlxd_stalled_seconds", "Since the last step while there is work", status.stalled_s or 0
        )

    def _about_models(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        held = GaugeMetricFamily("omlxd_model_bytes", "Memory by model", labels=["model", "kind"])
        states = GaugeMetricFamily("omlxd_model_state", "1 for the model's state", labels=["model", "state"])
        requests = GaugeMetricFamily("omlxd_model_requests", "Requests in flight", labels=["model", "state"])
        for model in self._status.models:
            loaded = model.state in (EntryState.LOADED, EntryState.UNLOADING)
            held.add_metric([model.name, "weights"], model.weights_bytes or 0 if loaded else 0)
            held.add_metric([model.name, "kv"], model.kv_bytes)
            held.add_metric([model.name, "prefix_cache"], model.prefix_cache_bytes)
            held.add_metric([model.name, "committed"], model.committed_bytes)
            for state in EntryState:
                states.add_metric([model.name, state.value], state is model.state)
            for kind in ("running", "waiting", "parked"):
                requests.add_metric([model.name, kind], getattr(model, kind))
        yield from (held, states, requests)

    def _counted(self) -> Iterator[Metric]:
        yield _counter("requests", "Requests that ended", ("model", "end"), self._requests)
        yield _counter("tokens", "Tokens of prompts and answers", ("model", "kind"), self._tokens)
        yield _counter("waits", "Requests that had to wait for their model", ("model",), _single(self._waits))
        yield _counter("parks", "Requests that were parked", ("model",), _single(self._parks))
        yield _counter("loads", "Loads that ended", ("model", "end"), self._loads)
        yield _counter("decisions", "What was done about memory, and why", ("trigger", "action"), self._decisions)

    def _timed(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import HistogramMetricFamily

        for name, (told, (buckets, total)) in self._times.items():
            yield HistogramMetricFamily(f"omlxd_{name}_seconds", told, buckets=buckets, sum_value=total)


def _counter(name: str, told: str, labels: tuple[str, ...], counts: Mapping[Any, int]) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(f"omlxd_{name}", told, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family


def _single(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(name,): count for name, count in counts.items()}


def _snapshot(histogram: Histogram) -> tuple[list[tuple[str, int]], float]:
    return histogram.cumulative(), histogram.total


def _written(gathered: Any) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest  # 50 ms, and few daemons are ever asked

    registry = CollectorRegistry(auto_describe=False)
    registry.register(gathered)
    return bytes(generate_latest(registry))
