"""The control API on the Unix socket: what `omlxd` on the command line does. A call answers after its effect."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omlxd.core.errors import Busy, InvalidRequest, OmlxError
from omlxd.core.states import SCHEMA, flat
from omlxd.daemon import event_stream, pinning
from omlxd.daemon.app import Daemon
from omlxd.daemon.bodies import LimitsBody, LoadBody, NoBody, PinBody, ReloadBody, StopBody, UnloadBody, read_body
from omlxd.daemon.http_errors import CONTROL_PREFIX, JsonResponse, NoSuchRequest, ViewsResponse
from omlxd.daemon.limit_change import change_limit
from omlxd.daemon.load_ticket import LoadStatus
from omlxd.daemon.planning import make_plan, plan_json
from omlxd.daemon.reloading import Reloader
from omlxd.daemon.streams import NDJSON, Stream

_ABORT_TIMEOUT_S = 10.0


def routes(daemon: Daemon) -> list[Route]:
    """The routes; they exist on the Unix socket only."""
    api = _ControlApi(daemon)
    model = f"{CONTROL_PREFIX}/models/{{name}}"
    return [
        Route(f"{CONTROL_PREFIX}/status", api.status, methods=["GET"]),
        Route(f"{CONTROL_PREFIX}/models", api.models, methods=["GET"]),
        Route(f"{model}/load", api.load, methods=["POST"]),
        Route(f"{model}/unload", api.unload, methods=["POST"]),
        Route(f"{model}/pin", api.pin, methods=["POST"]),
        Route(f"{model}/unpin", api.unpin, methods=["POST"]),
        Route(f"{CONTROL_PREFIX}/limits", api.limits, methods=["PATCH"]),
        Route(f"{CONTROL_PREFIX}/requests", api.requests, methods=["GET"]),
        Route(f"{CONTROL_PREFIX}/requests/{{id}}", api.abort, methods=["DELETE"]),
        Route(f"{CONTROL_PREFIX}/plan", api.plan, methods=["GET"]),
        Route(f"{CONTROL_PREFIX}/history", api.history, methods=["GET"]),
        Route(f"{CONTROL_PREFIX}/events", api.events, methods=["GET"]),
        Route(f"{CONTROL_PREFIX}/reload", api.reload, methods=["POST"]),
        Route(f"{CONTROL_PREFIX}/stop", api.stop, methods=["POST"]),
    ]


class _ControlApi:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def status(self, request: Request) -> Response:
        return ViewsResponse(self._daemon.status().to_json())

    async def models(self, request: Request) -> Response:
        return ViewsResponse({"schema": SCHEMA, "models": self._daemon.monitor.models()})

    async def load(self, request: Request) -> Response:
        body = await read_body(request, LoadBody)
        pool, name = self._daemon.pool, request.path_params["name"]
        entry = pool.resolve(name)
        warnings: tuple[str, ...] = ()
        if body.pin:
            warnings = await pinning.pin(self._daemon, entry.name)
        if not body.wait and not entry.loaded:
            self._daemon.in_background(pool.load(entry.name))
            await asyncio.sleep(0)  # so that the view shows it on its way
            return _answer(**self._loaded(entry.name, loaded_now=False), warnings=list(warnings))
        if NDJSON in request.headers.get("accept", ""):
            return Stream(self._progress(entry.name, warnings), NDJSON)
        was_loaded = entry.loaded
        await pool.load(entry.name)
        return _answer(**self._loaded(entry.name, loaded_now=not was_loaded), warnings=list(warnings))

    async def unload(self, request: Request) -> Response:
        body = await read_body(request, UnloadBody)
        name = request.path_params["name"]
        done = await self._daemon.pool.unload(name, now=body.now, drain_timeout_s=body.drain_timeout_s)
        return _answer(model=self._view(name), freed_bytes=done.freed_bytes, was=done.was.value)

    async def pin(self, request: Request) -> Response:
        body = await read_body(request, PinBody)
        warnings = await pinning.pin(self._daemon, request.path_params["name"], force=body.force)
        return _answer(model=self._view(request.path_params["name"]), warnings=list(warnings))

    async def unpin(self, request: Request) -> Response:
        await read_body(request, NoBody)
        name = request.path_params["name"]
        warnings = await pinning.unpin(self._daemon, name)
        manifest_pin = self._daemon.pool.resolve(name).settings.pin
        return _answer(model=self._view(name), manifest_pin=manifest_pin, warnings=list(warnings))

    async def limits(self, request: Request) -> Response:
        body = await read_body(request, LimitsBody)
        done = await change_limit(self._daemon, body.max_memory, force=body.force)
        return _answer(
            memory=flat(self._daemon.monitor.memory()),
            **done.effects(),
            warnings=list(done.warnings),
            level=self._daemon.enforcer.level.value,
        )

    async def requests(self, request: Request) -> Response:
        return ViewsResponse({"schema": SCHEMA, "requests": self._daemon.monitor.requests()})

    async def abort(self, request: Request) -> Response:
        request_id, pool = request.path_params["id"], self._daemon.pool
        if not pool.abort(request_id, "somebody asked for it (`omlxd abort`)"):
            raise NoSuchRequest(f"no request `{request_id}` is in flight", hint="`omlxd requests` lists them")
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):  # its memory comes back with the engine's next step
                while any(request_id in entry.requests for entry in pool.entries.values()):
                    await pool.change.wait()
        except TimeoutError:
            pass  # aborted all the same: a step that takes this long shows as stalled
        return _answer(id=request_id, aborted=True)

    async def plan(self, request: Request) -> Response:
        """What `omlxd plan --json` says; the files are read in a thread."""
        names = request.query_params.getlist("model")
        tokens, rows = _whole(request, "context"), _whole(request, "concurrency", "1")
        if rows < 1:
            raise InvalidRequest(
                "`concurrency` must be at least 1", hint="leave it out for 1", details={"param": "concurrency"}
            )
        surroundings = self._daemon.surroundings(request.query_params.get("max_memory"))
        made = await asyncio.to_thread(make_plan, surroundings, names, tokens or None, rows)
        return JsonResponse(plan_json(surroundings, made))

    async def history(self, request: Request) -> Response:
        return _answer(**self._daemon.history.to_json())

    async def events(self, request: Request) -> Response:
        since, following = _whole(request, "since"), _flag(request, "follow")
        return Stream(self._events(since, request.query_params.get("run"), following=following), NDJSON)

    async def reload(self, request: Request) -> Response:
        body, daemon = await read_body(request, ReloadBody), self._daemon
        if (reloader := daemon.reloader) is None:
            raise Busy("the daemon is starting", details={"retry_after_s": 1.0})
        before = daemon.pool.roster.loaded_names
        done = {"manifest": daemon.manifest.path, **(await reloader.reload(force=body.force)).to_json()}
        if body.wait and NDJSON in request.headers.get("accept", ""):
            return Stream(self._reloading(reloader, done, before), NDJSON)
        if body.wait:
            done |= await self._settled(reloader, before)
        return _answer(**done)

    async def stop(self, request: Request) -> Response:
        body = await read_body(request, StopBody)
        daemon = self._daemon
        if body.restart and not body.force and (unsaved := await daemon.state_file.unsaved()):
            raise Busy(
                f"a restart would lose what could not be saved, {unsaved}",
                hint="make room on the disk of the home; `omlxd restart --force` gives up what is not saved",
            )
        daemon.stop.to_restart = daemon.stop.to_restart or body.restart
        daemon.stop.ask("`omlxd restart`" if body.restart else "`omlxd stop`", now=body.now)
        options = {"manifest": daemon.manifest.path, **daemon.flags.to_json()}
        limit = None if daemon.state_file.limit_saved else daemon.state_file.state.limit
        if limit is not None:
            options["max_memory"] = limit.max_memory  # or the successor would fall back to a wider one
        unsaved = None if limit is None else limit.max_memory
        return _answer(state="draining", pid=os.getpid(), options=options, unsaved_limit=unsaved)

    async def _events(self, since: int, of_run: str | None, *, following: bool) -> AsyncGenerator[bytes, None]:
        daemon = self._daemon
        if not following:
            for event in daemon.bus.since(since):
                yield _line(event.to_json())
            return
        async with aclosing(event_stream.follow(daemon.bus, daemon.run, since=since, of_run=of_run)) as stream:
            async for each in stream:
                yield _line(each)

    async def _reloading(
        self, reloader: Reloader, done: dict[str, Any], before: frozenset[str]
    ) -> AsyncGenerator[bytes, None]:
        """A line with what was changed, and one when everything that it leads to has happened."""
        yield _line({"applied": done})
        yield _line({"result": {"schema": SCHEMA, **done, **await self._settled(reloader, before)}})

    async def _settled(self, reloader: Reloader, before: frozenset[str]) -> dict[str, list[str]]:
        """Which models were loaded and unloaded until everything that a reload leads to had happened."""
        await reloader.settled()
        now = self._daemon.pool.roster.loaded_names
        return {"loaded": sorted(now - before), "unloaded": sorted(before - now)}

    async def _progress(self, name: str, warnings: tuple[str, ...]) -> AsyncGenerator[bytes, None]:
        """Lines while it loads, then the result or the error; who stops reading leaves the load as it is."""
        news = asyncio.Event()
        latest: list[LoadStatus] = []  # only the newest: a slow reader misses steps, not the end

        def tell(status: LoadStatus) -> None:
            latest[:] = [status]
            news.set()

        was_loaded = self._daemon.pool.resolve(name).loaded
        loading = asyncio.create_task(self._daemon.pool.load(name, on_progress=tell))
        loading.add_done_callback(lambda _: news.set())
        try:
            while not loading.done():
                await news.wait()
                news.clear()
                for status in latest:
                    yield _line({"progress": asdict(status)})
                latest.clear()
            await loading
            result = {"schema": SCHEMA, **self._loaded(name, loaded_now=not was_loaded), "warnings": list(warnings)}
            yield _line({"result": result})
        except OmlxError as error:
            yield _line({"error": error.to_json()})
        finally:
            loading.cancel()

    def _loaded(self, name: str, *, loaded_now: bool) -> dict[str, Any]:
        report = self._daemon.pool.resolve(name).last_load if loaded_now else None
        return {
            "model": self._view(name),
            "load_s": None if report is None else report.load_s,
            "evicted": [] if report is None else list(report.evicted),
        }

    def _view(self, name: str) -> dict[str, Any]:
        return flat(self._daemon.monitor.model(name))


def _answer(**fields: Any) -> JsonResponse:
    return JsonResponse({"schema": SCHEMA, **fields})


def _line(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, default=repr, separators=(",", ":")).encode() + b"\n"


def _whole(request: Request, name: str, default: str = "0") -> int:
    text = request.query_params.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"`{name}` must be a whole number", hint=f"`?{name}=1`", details={"param": name})
    return int(text)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"`{name}` must be `true` or `false`", hint=f"`?{name}=true`", details={"param": name})
    return text in ("true", "1")
