"""Fixtures of the acceptance tests: daemons that are certainly gone at the end, and speak when a test failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.harness import TIMEOUT_S, Daemon, Models

if TYPE_CHECKING:
    import anthropic
    import openai

_DAEMONS = pytest.StashKey[list[Daemon]]()
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its daemons wrote."""
    report = yield
    if report.failed and call.when == "call":
        item.stash[_FAILED] = True
        of_the_module = [each for each in item.funcargs.values() if isinstance(each, Daemon)]  # type: ignore[attr-defined]
        for daemon in [*item.stash.get(_DAEMONS, []), *of_the_module]:
            report.sections.append((f"daemon in {daemon.home}", daemon.report()))
    return report


@pytest.fixture
def home_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., Daemon]]:
    """`home_of(models, daemon={...})`: a home with a manifest, where no daemon runs yet."""
    made: list[Daemon] = []
    request.node.stash[_DAEMONS] = made

    def make(models: Models | None = None, **settings: Any) -> Daemon:
        made.append(daemon := Daemon(models, **settings))
        return daemon

    yield make
    failed = request.node.stash.get(_FAILED, False)
    with contextlib.ExitStack() as stack:
        for daemon in made:
            stack.callback(daemon.close, test_failed=failed)


@pytest.fixture
def daemon_of(home_of: Callable[..., Daemon]) -> Callable[..., Daemon]:
    """`daemon_of(models, daemon={...})`: a daemon that answers; it must end with 0 when the test is over."""

    def make(models: Models, **settings: Any) -> Daemon:
        daemon = home_of(models, **settings).spawn()
        assert daemon.ready.get("ready"), daemon.ready
        return daemon

    return make


@pytest.fixture(scope="module")
def openai_client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    """A real client of the module's daemon, without a key."""
    import openai  # 1 s, and few modules need it

    with openai.OpenAI(
        base_url=f"http://{daemon.ready['api']}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    """A real client of the module's daemon, without a key."""
    import anthropic

    with anthropic.Anthropic(
        base_url=f"http://{daemon.ready['api']}", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


@pytest.fixture(scope="session")
def small(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """Models of 5 MB by their number: 2 KB of KV cache per token, about 800 tokens a second."""
    return lambda number=0, **options: tiny_model("llama", 5_000_000, seed=number, **options)


@pytest.fixture(scope="session")
def medium(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """Models of 60 MB by their number: 8 KB of KV cache per token, about 100 tokens a second."""
    return lambda number=0: tiny_model("llama", 60_000_000, seed=number)
