"""The property list says what launchd needs, whatever is in the paths; and launchctl is driven through its quirks."""

from __future__ import annotations

import plistlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import InvalidRequest, OmlxError
from omlxd.service.host import Ran, ServiceState, ServiceView
from omlxd.service.launchctl import Launchctl
from omlxd.service.launchd import plist_text, program_of, view_of
from omlxd.service.seal import is_unedited
from tests.service.specs import AWKWARD, PLAIN

RUNNING = "gui/501/org.omlxd = {\n\tstate = running\n\tpid = 4711\n\tlast exit code = 0\n\tx = {\n\t\tpid = 9\n\t}\n}\n"
CRASHED = "gui/501/org.omlxd = {\n\tstate = spawn scheduled\n\tlast exit code = 1\n}\n"
NEVER_RAN = "gui/501/org.omlxd = {\n\tstate = not running\n\tlast exit code = (never exited)\n}\n"


def parsed(text: str) -> dict[str, Any]:
    return plistlib.loads(text.encode())


def test_words_and_variables_arrive_as_they_are() -> None:
    job = parsed(plist_text(AWKWARD))
    assert job["ProgramArguments"] == [*AWKWARD.command, "--supervisor", "launchd"]
    assert job["EnvironmentVariables"] == AWKWARD.environment
    assert job["StandardErrorPath"] == str(AWKWARD.error_file)


def test_the_program_of_a_property_list_is_read_back_as_it_was_written() -> None:
    for spec in (PLAIN, AWKWARD):
        assert program_of(plist_text(spec)) == Path(spec.command[0])
    for text in (
        "",
        "<plist>",
        "<plist version='1.0'><dict/></plist>",
        "<plist version='1.0'><string>a</string></plist>",
    ):
        assert program_of(text) is None


def test_it_comes_back_after_a_crash_and_not_after_an_end_that_was_asked_for() -> None:
    job = parsed(plist_text(AWKWARD))
    assert job["KeepAlive"] == {"SuccessfulExit": False, "Crashed": True}
    assert job["ThrottleInterval"] == 30
    assert job["ExitTimeOut"] == 90
    assert job["RunAtLoad"] is True


def test_an_agent_runs_over_ssh_too_and_a_daemon_of_the_machine_as_its_user() -> None:
    agent, daemon = parsed(plist_text(PLAIN)), parsed(plist_text(replace(PLAIN, user="me")))
    assert agent["LimitLoadToSessionType"] == ["Aqua", "Background"]
    assert "UserName" not in agent
    assert daemon["UserName"] == "me"
    assert "LimitLoadToSessionType" not in daemon


def test_an_edit_is_seen() -> None:
    text = plist_text(PLAIN)
    assert is_unedited(text)
    assert not is_unedited(text.replace("<integer>30</integer>", "<integer>31</integer>"))


@pytest.mark.parametrize("path", ["/a\nb", "/a\x07", "/a\udcff"])
def test_what_neither_file_can_hold_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot hold"):
        replace(PLAIN, command=("/python", path))


@pytest.mark.parametrize(
    ("printed", "view"),
    [
        (RUNNING, ServiceView(ServiceState.RUNNING, pid=4711, last_exit=0)),
        (CRASHED, ServiceView(ServiceState.FAILED, last_exit=1)),
        (NEVER_RAN, ServiceView(ServiceState.STOPPED)),
    ],
)
def test_what_launchctl_prints_is_understood(printed: str, view: ServiceView) -> None:
    assert view_of(printed) == view


@dataclass
class FakeLaunchd:
    """Answers `launchctl`: one job, slow to go away, in a session with or without a screen."""

    gui: bool = True
    loaded: bool = False
    leaving: int = 0
    not_yet: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> Ran:
        verb, target = command[1], command[2]
        if verb != "print":
            self.said.append(" ".join(command[1:]))
        match verb:
            case "print" if target == "gui/501":
                return Ran(0 if self.gui else 113, "")
            case "print":
                self.leaving -= 1
                gone = not self.loaded and self.leaving < 0
                return Ran(113, "Could not find service") if gone else Ran(0, RUNNING)
            case "bootstrap":
                status = self.not_yet.pop(0) if self.not_yet else 0
                self.loaded = status == 0
                return Ran(status, "" if status == 0 else f"Bootstrap failed: {status}")
            case "bootout":
                self.loaded, self.leaving = False, 5
                return Ran(36, "Operation now in progress")
        return Ran(0, "")


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture
def launchctl(sleeps: list[float]) -> Callable[[FakeLaunchd], Launchctl]:
    return lambda launchd: Launchctl(launchd, 501, Path("/Users/me"), sleep=sleeps.append)


PATH = "/Users/me/Library/LaunchAgents/org.omlxd.plist"


def test_a_job_that_is_not_loaded_is_bootstrapped_and_one_that_is_is_started(launchctl: Any) -> None:
    launchd = FakeLaunchd()
    launchctl(launchd).start("omlxd")
    launchctl(launchd).start("omlxd")
    assert launchd.said == [f"bootstrap gui/501 {PATH}", "kickstart gui/501/org.omlxd"]


def test_without_a_screen_it_is_the_user_s_domain(launchctl: Any) -> None:
    launchd = FakeLaunchd(gui=False)
    launchctl(launchd).start("omlxd")
    assert launchd.said == [f"bootstrap user/501 {PATH}"]


def test_a_bootstrap_that_comes_too_early_is_tried_again(launchctl: Any, sleeps: list[float]) -> None:
    launchd = FakeLaunchd(not_yet=[5, 37])
    launchctl(launchd).start("omlxd")
    assert launchd.loaded
    assert len(sleeps) == 2


@pytest.mark.parametrize("statuses", [[125], [5] * 100])
def test_a_bootstrap_that_is_refused_is_an_error_with_launchd_s_words(launchctl: Any, statuses: list[int]) -> None:
    with pytest.raises(OmlxError, match=f"Bootstrap failed: {statuses[0]}"):
        launchctl(FakeLaunchd(not_yet=statuses)).start("omlxd")


def test_a_stop_waits_until_the_job_is_gone_and_does_nothing_when_it_is(launchctl: Any, sleeps: list[float]) -> None:
    launchd = FakeLaunchd(loaded=True)
    launchctl(launchd).stop("omlxd")
    assert len(sleeps) >= 4
    launchctl(launchd).stop("omlxd")
    assert launchd.said == ["bootout gui/501/org.omlxd"]
    assert launchctl(launchd).view("omlxd") == ServiceView(ServiceState.STOPPED)


def test_a_daemon_of_the_machine_is_in_the_system_s_domain() -> None:
    launchd = FakeLaunchd()
    Launchctl(launchd, 0, Path("/var/root"), system=True).start("omlxd")
    assert launchd.said == ["bootstrap system /Library/LaunchDaemons/org.omlxd.plist"]
