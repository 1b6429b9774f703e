"""The unit says what systemd needs, whatever is in the paths; and systemd itself reads it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.core.errors import InvalidRequest
from omlxd.service.host import ServiceState, ServiceView
from omlxd.service.seal import is_unedited
from omlxd.service.spec import ServiceSpec, service_name
from omlxd.service.systemd import program_of, unit_text, version_of, view_of
from tests.service.specs import AWKWARD, PLAIN


def settings(spec: ServiceSpec, version: int = 252) -> list[str]:
    return unit_text(spec, version).splitlines()


def test_words_are_quoted_and_mean_nothing_to_systemd() -> None:
    lines = settings(AWKWARD)
    assert (
        'ExecStart="/opt/my envs/ümlaut 100%%/python" "-m" "omlxd.daemon" "--home"'
        ' "/srv/a \\"b\\" $$HOME \\\\ %%h <&>" "--supervisor" "systemd"'
    ) in lines
    assert 'Environment="WORDS=two words, 50%% of \\"them\\", $HOME and \\\\"' in lines
    assert 'Environment="EMPTY="' in lines


def test_the_program_of_a_unit_is_read_back_as_it_was_written() -> None:
    odd = replace(PLAIN, command=('/opt/a "b" 100% \\ü/python', "-m", "omlxd.daemon"))
    for spec in (PLAIN, AWKWARD, odd):
        assert program_of(unit_text(spec, 252)) == Path(spec.command[0])
    assert program_of("[Service]\nExecStart=/bin/true\n") is None


def test_a_program_that_systemd_cannot_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"a `\$` in the path"):
        unit_text(replace(PLAIN, command=("/opt/$x/python",)), 252)


def test_it_waits_for_ready_watches_and_does_not_loop_on_a_bad_manifest() -> None:
    lines = settings(AWKWARD)
    for line in ("Type=notify", "WatchdogSec=180", "Restart=on-failure", "RestartPreventExitStatus=2 78"):
        assert line in lines
    assert "TimeoutStopSec=90" in lines


def test_delays_grow_where_systemd_can_and_otherwise_it_gives_up_after_ten_tries() -> None:
    assert "RestartMaxDelaySec=300" in settings(PLAIN, 254)
    assert "StartLimitIntervalSec=0" in settings(PLAIN, 254)
    assert not [line for line in settings(PLAIN, 253) if line.startswith("RestartMaxDelaySec")]
    assert "StartLimitBurst=10" in settings(PLAIN, 253)


def test_an_edit_is_seen() -> None:
    text = unit_text(PLAIN, 252)
    assert is_unedited(text)
    assert not is_unedited(text.replace("WatchdogSec=180", "WatchdogSec=181"))
    assert not is_unedited(text + "# mine\n")
    assert not is_unedited("[Service]\nExecStart=/bin/true\n")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("spec", [PLAIN, AWKWARD], ids=["plain", "awkward"])
def test_systemd_finds_nothing_wrong_with_it(spec: ServiceSpec, tmp_path: Path) -> None:
    program = tmp_path / Path(spec.command[0]).relative_to("/")
    program.parent.mkdir(parents=True)
    program.symlink_to("/bin/sh")
    unit = tmp_path / "omlxd.service"
    spec = replace(spec, command=(str(program), *spec.command[1:]))
    version = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    unit.write_text(unit_text(spec, version_of(version)))
    verified = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", str(unit)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("shown", "view"),
    [
        (
            "LoadState=loaded\nActiveState=active\nUnitFileState=enabled\nMainPID=4711\nExecMainStatus=0\n",
            ServiceView(ServiceState.RUNNING, enabled=True, pid=4711),
        ),
        (
            "LoadState=loaded\nActiveState=failed\nUnitFileState=disabled\nMainPID=0\nExecMainStatus=78\n",
            ServiceView(ServiceState.FAILED, enabled=False, last_exit=78),
        ),
        ("LoadState=not-found\nActiveState=inactive\n", ServiceView(ServiceState.STOPPED, enabled=False, last_exit=0)),
        ("", ServiceView(ServiceState.UNKNOWN, enabled=False, last_exit=0)),
    ],
)
def test_what_systemctl_shows_is_understood(shown: str, view: ServiceView) -> None:
    assert view_of(shown) == view


def test_another_home_is_another_service() -> None:
    default = Path("/home/me/.omlxd")
    assert service_name(default, default) == "omlxd"
    names = {service_name(Path(path), default) for path in ("/a", "/b", "/a b/ü")}
    assert len(names) == 3
    assert all(name.startswith("omlxd-") and len(name) == 14 for name in names)
