"""The command line: arguments, exit statuses, the start gate against a fake sidecar."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvcellar import __version__, cli, contract
from kvcellar.cli import client, wait
from kvcellar.cli.client import Answer, SidecarClient
from kvcellar.contract import OnFailure, RegionState, StartGate
from kvcellar.errors import DoesNotFit, KVCellarError, MetadataDamaged, NotReady

PLAN = {"fits": True, "askedBytes": 9, "freeBytes": 10, "bindingLimit": "tmpfs", "limits": []}
REFUSED = {**PLAN, "fits": False, "freeBytes": 8}
REGION = {
    **dict.fromkeys(("capacityBytes", "reservedBytes", "settledBytes", "usedBytes"), 9),
    "engineId": "a",
    "generation": 1,
    "participants": [],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(contract.ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setattr(wait, "_POLL_S", 0.0)
    monkeypatch.setattr(cli, "_leave_on_sigterm", lambda status: None)


class Sidecar:
    """Answers as a sidecar would whose regions go through `states`, one more at each look."""

    def __init__(
        self,
        *states: RegionState | None,
        plan: dict[str, object] = PLAN,
        on_failure: OnFailure = OnFailure.DEGRADE,
    ) -> None:
        self._states = list(states)
        self._plan = plan
        self._on_failure = on_failure

    def get(self, _client: SidecarClient, path: str) -> Answer | None:
        state = self._states[0]
        if state is None:
            self._states.pop(0)
            return None
        match path:
            case "/v1/regions":
                if len(self._states) > 1:
                    self._states.pop(0)
                reason = "too big" if state is RegionState.FAILED else ""
                region = {**REGION, "state": state, "reason": reason}
                return Answer(200, json.dumps({"regions": [region]}))
            case "/v1/plan":
                known = state is not RegionState.PLANNED
                return Answer(200, json.dumps(self._plan)) if known else Answer(503, "{}")
            case _:
                failed = state is RegionState.FAILED and self._on_failure is OnFailure.FAIL
                if failed or state is RegionState.PLANNED:
                    return Answer(503, json.dumps({"detail": "not yet decided"}))
                return Answer(200, "ok\n")


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> type[Sidecar]:
    class Installed(Sidecar):
        def __init__(
            self,
            *states: RegionState | None,
            plan: dict[str, object] = PLAN,
            on_failure: OnFailure = OnFailure.DEGRADE,
        ) -> None:
            super().__init__(*states, plan=plan, on_failure=on_failure)
            monkeypatch.setattr(SidecarClient, "get", lambda client, path: self.get(client, path))
            monkeypatch.setenv("KVCELLAR_ON_FAILURE", on_failure)

    return Installed


S = RegionState
NO_REGIONS = (
    '{"regions": []}',
    '{"regions": null}',
    '{"regions": 5}',
    '{"regions": [{"engineId": 7}]}',
    json.dumps({"regions": [{**REGION, "reason": "", "state": []}]}),
    "[" * 100_000,
    "9" * 5000,
)
"""Bodies that a sidecar does not give, but another server at that address may."""


@pytest.mark.parametrize(
    ("gate", "states"),
    [
        (StartGate.PLAN, [None, S.PLANNED, S.RESERVING]),
        (StartGate.RESERVED, [None, S.PLANNED, S.RESERVING, S.RESERVING, S.RESERVED]),
        (StartGate.SETTLED, [S.RESERVING, S.RESERVED, S.READY]),
    ],
)
def test_a_gate_opens_when_the_regions_are_far_enough(
    sidecar: type[Sidecar],
    capsys: pytest.CaptureFixture[str],
    gate: StartGate,
    states: list[RegionState | None],
) -> None:
    sidecar(*states)
    assert wait.run(gate, 5.0) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "regions", [None, Answer(503, "{}"), *(Answer(200, text) for text in NO_REGIONS)]
)
@pytest.mark.parametrize("gate", list(StartGate))
def test_a_gate_stays_shut_while_no_region_is_shown(
    monkeypatch: pytest.MonkeyPatch, gate: StartGate, regions: Answer | None
) -> None:
    answers = {"/startupz": Answer(200, "ok\n"), "/v1/regions": regions}
    monkeypatch.setattr(SidecarClient, "get", lambda _client, path: answers.get(path))
    with pytest.raises(NotReady, match="shows no region"):
        wait.run(gate, 0.0)


@pytest.mark.parametrize(
    ("gate", "state", "why"),
    [
        (StartGate.PLAN, None, "no sidecar answers at 127.0.0.1:9785"),
        (StartGate.PLAN, S.PLANNED, "not yet decided"),
        (StartGate.RESERVED, S.RESERVING, "region a is Reserving"),
        (StartGate.SETTLED, S.RESERVED, "region a is Reserved"),
    ],
)
def test_a_gate_that_stays_shut_says_why_at_the_deadline(
    sidecar: type[Sidecar], gate: StartGate, state: RegionState | None, why: str
) -> None:
    sidecar(*([state] * 10_000_000 if state is None else [state]))
    with pytest.raises(NotReady, match=why):
        wait.run(gate, 0.05)


@pytest.mark.parametrize("gate", list(StartGate))
def test_under_degrade_a_refused_plan_opens_every_gate_and_is_printed(
    sidecar: type[Sidecar], capsys: pytest.CaptureFixture[str], gate: StartGate
) -> None:
    sidecar(S.PLANNED, S.FAILED, plan=REFUSED)
    assert wait.run(gate, 5.0) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == REFUSED
    assert "region a is Failed: too big" in printed.err


@pytest.mark.parametrize("gate", list(StartGate))
def test_under_fail_a_refused_plan_ends_with_3_and_is_printed(
    sidecar: type[Sidecar], capsys: pytest.CaptureFixture[str], gate: StartGate
) -> None:
    sidecar(S.FAILED, plan=REFUSED, on_failure=OnFailure.FAIL)
    with pytest.raises(DoesNotFit, match="too big") as caught:
        wait.run(gate, 5.0)
    assert (caught.value.asked_bytes, caught.value.free_bytes) == (9, 8)
    assert json.loads(capsys.readouterr().out) == REFUSED


def test_under_fail_another_failure_ends_with_6(sidecar: type[Sidecar]) -> None:
    sidecar(S.FAILED, on_failure=OnFailure.FAIL)
    with pytest.raises(NotReady, match="too big"):
        wait.run(StartGate.RESERVED, 5.0)


def test_an_answer_that_is_no_json_object_is_an_empty_one() -> None:
    assert Answer(200, "<html>").json() == {}
    assert Answer(200, "[1]").json() == {}
    assert Answer(503, "busy\n").detail == "busy"


def test_a_refusal_without_a_reason_keeps_every_gate_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SidecarClient, "get", lambda _client, _path: Answer(500, ""))
    for gate in StartGate:
        with pytest.raises(NotReady, match="status 500"):
            wait.run(gate, 0.0)


def test_under_fail_a_refused_plan_without_figures_ends_with_3(sidecar: type[Sidecar]) -> None:
    sidecar(S.FAILED, plan={"fits": False, "askedBytes": "x"}, on_failure=OnFailure.FAIL)
    with pytest.raises(DoesNotFit, match="too big"):
        wait.run(StartGate.PLAN, 5.0)


@pytest.mark.parametrize("piece", [b" ", b" " * 65536], ids=["drip", "flood"])
def test_an_answer_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_send_for_ever, args=(server, piece), daemon=True).start()
        began = time.monotonic()
        assert SidecarClient("127.0.0.1", server.getsockname()[1]).get("/livez") is None
    assert time.monotonic() - began < 5.0


def _send_for_ever(server: socket.socket, piece: bytes) -> None:
    connection, _ = server.accept()
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(piece)
            time.sleep(0.01)


@pytest.mark.parametrize("host", ["a..b", "a" * 80])
def test_nobody_answers_at_what_is_no_name_of_a_machine(host: str) -> None:
    assert SidecarClient(host, 9785).get("/livez") is None


# --- main ---------------------------------------------------------------------------------------------


def test_an_error_is_one_sentence_and_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_given: list[str]) -> int:
        raise MetadataDamaged("the page is damaged")

    monkeypatch.setattr(cli, "_run", broken)
    assert cli.main(["status"]) == 5
    assert capsys.readouterr().err == "kvcellar: the page is damaged\n"


@pytest.mark.parametrize("command", [["status"], ["clean"], ["sidecar"], ["wait", "--for", "plan"]])
def test_every_command_refuses_an_unknown_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("KVCELLAR_RETENTOIN", "keep")
    assert cli.main(command) == 2
    assert capsys.readouterr().err.startswith("kvcellar: KVCELLAR_RETENTOIN is not a setting")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["wait"],
        ["wait", "--for", "lunch"],
        ["wait", "--for", "plan", "--timeout", "-1"],
        ["wait", "--for", "plan", "--timeout", "nan"],
        ["wait", "--for", "plan", "--timeout", "soon"],
        ["status", "extra"],
        ["sidecar", "--nonsense"],
        ["clean", "--force"],
    ],
)
def test_bad_arguments_end_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sidecar", "wait", "status", "clean"])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"kvcellar {command}" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kvcellar {__version__}\n"


def test_a_missing_package_is_named_with_its_remedy() -> None:
    program = (
        "import sys; sys.modules['pydantic_settings'] = None; "
        "from kvcellar import cli; sys.exit(cli.main(['status']))"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr == (
        "kvcellar: pydantic_settings is not installed: pip install 'kvcellar[cli]' brings it\n"
    )


def test_importing_the_command_line_imports_no_web_stack() -> None:
    program = (
        "import sys, kvcellar.cli; "
        "print([m for m in ('pydantic', 'fastapi', 'numpy', 'asyncio') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


ODD = "\x1b[2J\r\nkvcellar: all is well\x07"


@pytest.mark.parametrize(
    ("command", "status"), [(["status"], 0), (["wait", "--for", "reserved", "--timeout", "0"], 6)]
)
def test_what_a_server_says_does_not_move_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    status: int,
) -> None:
    region = {**REGION, "engineId": ODD, "state": ODD, "reason": ODD}
    answers = {"/v1/regions": {"regions": [region]}, "/v1/plan": {}, "/startupz": {}}
    monkeypatch.setattr(
        SidecarClient, "get", lambda _, path: Answer(200, json.dumps(answers[path]))
    )
    assert cli.main(command) == status
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "\\x1b[2J\\r\\n" in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert not any(line.startswith("kvcellar: all is well") for line in text.split("\n"))


def test_a_reason_for_a_shut_gate_does_not_move_the_terminal() -> None:
    assert Answer(503, json.dumps({"detail": ODD})).detail.isprintable()
    assert Answer(503, "\x1b]0;title\x07").detail == "\\x1b]0;title\\x07"


def test_the_lines_of_an_error_stay_lines_and_nothing_else_moves_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> int:
        raise KVCellarError("it ends with its log:\none \x1b[31mline\ranother")

    monkeypatch.setattr("kvcellar.cli.status.run", fail)
    assert cli.main(["status"]) == 1
    said = capsys.readouterr().err
    assert said == "kvcellar: it ends with its log:\none \\x1b[31mline\\ranother\n"
