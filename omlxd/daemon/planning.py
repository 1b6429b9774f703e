"""What a plan is made of, for the command line without a daemon and for the daemon's own route: files in, figures out.

Reads configs and headers, no weights; imports neither MLX nor pydantic.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from omlxd.core.costs import costs_of_config
from omlxd.core.errors import InvalidRequest, LoadFailed, NotPermitted, OmlxError
from omlxd.core.limits import MemoryLimits
from omlxd.core.manifest import Manifest, ModelSettings
from omlxd.core.memory import Policy
from omlxd.core.plan import PINNED, Neighbour, Planner, Verdict, Wish
from omlxd.core.saved_state import SavedState
from omlxd.core.states import SCHEMA, EntryState, LimitOrigin
from omlxd.daemon.model_files import model_folder, read_model_folder

CONTEXT_TOKENS: Final = 4096
_HELD: Final = (EntryState.LOADED.value, EntryState.LOADING.value, EntryState.UNLOADING.value)


@dataclass(frozen=True)
class Surroundings:
    """What a plan is made in.

    Attributes:
        manifest: the models, and how they are run.
        planner: the limits, and who is in memory.
        state: what was learned.
        backend: `cpu`, `metal` or `cuda`.
        running: whether the figures are a running daemon's.
    """

    manifest: Manifest
    planner: Planner
    state: SavedState
    backend: str
    running: bool

    def chosen(self, names: Sequence[str]) -> list[ModelSettings]:
        """The models of these names, each once; all of the manifest without any. Raises UnknownModel."""
        found = [self.manifest.model(name) for name in names] or list(self.manifest.models.values())
        return list({model.name: model for model in found}.values())

    def wish(self, model: ModelSettings, tokens: int | None, rows: int) -> Wish:
        """What running the model like this takes; reads its config and headers.

        Args:
            model: its part of the manifest.
            tokens: prompt and answer together; by default 4096, or the model's most.
            rows: requests at the same time.

        Raises:
            LoadFailed, NotPermitted: its files are not a model, or may not be read.
            InvalidRequest: it cannot have such a context.
        """
        files = read_model_folder(model_folder(model))
        longest = min((each for each in (model.max_context, files.context_length) if each), default=None)
        if longest is not None and (tokens or 0) > longest:
            raise InvalidRequest(
                f"`{model.name}` has a context of {longest} tokens, not {tokens}",
                hint=f"`--context {longest}`",
                details={"context_length": longest},
            )
        learned = self.state.learned.get(model.name)
        costs = learned.costs if learned is not None and learned.fingerprint == files.fingerprint else None
        return Wish(
            name=model.name,
            weights_bytes=files.weights_bytes,
            costs=costs_of_config(files.config, files.element_bytes, costs, self.backend),
            context_tokens=tokens or min(CONTEXT_TOKENS, longest or CONTEXT_TOKENS),
            rows=rows,
            longest_tokens=longest,
        )


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A model of the manifest that cannot be judged, and why."""

    name: str
    error: OmlxError


@dataclass(frozen=True, slots=True)
class Plan:
    """The verdict on each wish by itself, and on all of them at the same time where that was asked for.

    `left_out` are models that nobody asked for by name and that cannot be judged: the others are, all the same.
    """

    rows: tuple[tuple[Wish, Verdict], ...]
    together: Verdict | None
    left_out: tuple[LeftOut, ...] = ()


def make_plan(surroundings: Surroundings, names: Sequence[str], tokens: int | None, rows: int) -> Plan:
    """Judge these models together and by themselves, or without any each of the manifest by itself.

    Raises:
        UnknownModel: the manifest has no model of such a name.
        InvalidRequest: not so many requests of a model run at a time.
        OmlxError: what `wish` raises of a model that is named, or InvalidRequest of all.
    """
    planner = surroundings.planner
    if rows > planner.max_batch:
        raise InvalidRequest(
            f"at most {planner.max_batch} requests of a model run at a time",
            hint="raise `max_batch` in the manifest, or lower `--concurrency`",
        )
    wishes, left_out = list[Wish](), list[LeftOut]()
    for model in surroundings.chosen(names):
        try:
            wishes.append(surroundings.wish(model, tokens, rows))
        except (LoadFailed, NotPermitted, InvalidRequest) as error:
            if names:
                raise
            left_out.append(LeftOut(model.name, error))
    if not wishes and left_out and all(isinstance(each.error, InvalidRequest) for each in left_out):
        raise left_out[0].error  # what was asked is too much for every one
    verdicts = tuple((wish, planner.alone(wish)) for wish in wishes)
    return Plan(verdicts, planner.together(wishes) if len(names) > 1 else None, tuple(left_out))


def plan_json(surroundings: Surroundings, plan: Plan) -> dict[str, Any]:
    """The plan as `omlxd plan --json` and the route show it."""
    limits = surroundings.planner.limits
    return {
        "schema": SCHEMA,
        "manifest": surroundings.manifest.path,
        "daemon": surroundings.running,
        "backend": surroundings.backend,
        "soft_limit": limits.soft_bytes,
        "hard_limit": limits.hard_bytes,
        "binding": limits.binding,
        "hard_binding": limits.hard_binding,
        "models": [
            {"context": wish.context_tokens, "concurrency": wish.rows, **_verdict_json(verdict)}
            | {"max_context": verdict.max_context_tokens, "max_concurrency": verdict.max_concurrency}
            for wish, verdict in plan.rows
        ],
        "together": None if plan.together is None else _verdict_json(plan.together),
        "left_out": [
            {"name": each.name, "problem": each.error.message, "hint": each.error.hint} for each in plan.left_out
        ],
    }


def planner_of(
    manifest: Manifest, limits: MemoryLimits, neighbours: tuple[Neighbour, ...], unaccounted_bytes: int
) -> Planner:
    """The planner for these limits and neighbours, with the manifest's chunks and batches."""
    return Planner(
        limits,
        neighbours,
        chunk_tokens=manifest.daemon.prefill_chunk_tokens,
        max_batch=manifest.daemon.max_batch,
        unaccounted_bytes=unaccounted_bytes,
        parks=manifest.daemon.policy is Policy.GRACEFUL,
    )


def limits_in_force(memory: Mapping[str, Any]) -> MemoryLimits:
    """The limits of a daemon, from the `memory` of its status."""
    hard_binding = memory.get("hard_binding") or memory["binding"]
    origin = memory.get("limit_origin")
    return MemoryLimits(
        memory["soft_limit"],
        memory["hard_limit"],
        memory["binding"],
        hard_binding=hard_binding,
        origin=LimitOrigin(origin) if origin else LimitOrigin.MANIFEST,  # an older daemon does not say it
    )


def neighbours_of(models: Sequence[Mapping[str, Any]]) -> tuple[Neighbour, ...]:
    """Who holds memory now, least recently used first, from the `models` of a daemon's status."""
    held = [model for model in models if model["state"] in _HELD]
    held.sort(key=lambda model: (-(model["last_used_s"] or 0.0), model["name"]))

    def why(model: Mapping[str, Any]) -> str:
        if model["pinned"]:
            return PINNED
        if model["state"] != EntryState.LOADED.value:
            return str(model["state"])
        return "busy" if model["running"] or model["waiting"] else ""

    return tuple(Neighbour(model["name"], model["committed_bytes"], bool(why(model)), why(model)) for model in held)


def default_backend() -> str:
    """What this platform has, as long as no engine has said what it runs on."""
    return "metal" if sys.platform == "darwin" else "cpu"


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "names": list(verdict.names),
        "fits": verdict.fits,
        **asdict(verdict.need),
        "evict": list(verdict.evict),
        "beside": [each.name for each in verdict.beside],
        "beside_bytes": verdict.beside_bytes,
        "waits_for": list(verdict.waits_for),
        "limit_bytes": verdict.limit_bytes,
        "binding": verdict.binding,
        "hard": verdict.hard,
        "short_bytes": verdict.short_bytes,
        "known": verdict.known,
        "why": verdict.why,
    }
