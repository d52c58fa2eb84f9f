"""Command lines of the operator: what they mean, and what is refused by name."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvcellar.daemon.keeper import WATCH_S
from kvcellar.errors import ConfigurationError
from kvcellar_operator.config import ControllerSettings, WebhookSettings, parse
from kvcellar_operator.connection import Connection
from kvcellar_operator.inject import Profile
from kvcellar_operator.login import Login, read_account, read_kubeconfig
from kvcellar_operator.profiles import Capacity

WEBHOOK = ["webhook", "--namespace", "own", "--image", "kvcellar:1"]
CONTROLLER = ["controller", "--namespace", "own"]


def webhook(*more: str) -> WebhookSettings:
    settings = parse([*WEBHOOK, *more])
    assert isinstance(settings, WebhookSettings)
    return settings


def controller(*more: str) -> ControllerSettings:
    settings = parse([*CONTROLLER, *more])
    assert isinstance(settings, ControllerSettings)
    return settings


def test_defaults_are_those_of_the_documents() -> None:
    settings = webhook()
    assert settings.port == 10250
    assert settings.tls.names == ("kvcellar-webhook.own.svc",)
    assert settings.tls.folder is None
    assert settings.inject.default_profile == Profile()
    assert settings.inject.run_as_user == 65532
    assert controller().poll_at_once == 32
    assert controller().common.watch_namespaces == ()


def test_flags_reach_the_injector() -> None:
    settings = webhook("--run-as-user", "none", "--gpu-resource", "a.b/c", "--shared-group", "7")
    assert settings.inject.run_as_user is None
    assert settings.inject.gpu_resources == ("a.b/c",)
    assert settings.inject.shared_group == 7
    assert webhook("--tls-name", "127.0.0.1").tls.names == ("127.0.0.1",)
    spaces = controller("--watch-namespace", "a", "--watch-namespace", "b").common.watch_namespaces
    assert spaces == ("a", "b")


def test_the_default_profile_is_a_spec_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text("capacity: 4Gi\nengines: 2\n")
    profile = webhook("--default-profile", str(file)).inject.default_profile
    assert profile == Profile(capacity=Capacity("4Gi", size_bytes=4 * 2**30), engines=2)
    file.write_text("")
    assert webhook("--default-profile", str(file)).inject.default_profile == Profile()


@pytest.mark.parametrize(
    ("text", "named"),
    [("engines: many", "spec.engines"), ("colour: red", "spec.colour"), ("[", "no YAML")],
)
def test_a_bad_default_profile_stops_the_start(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        webhook("--default-profile", str(file))
    with pytest.raises(ConfigurationError, match="No such file"):
        webhook("--default-profile", str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["webhook", "--image", "i"], "--namespace"),
        (["webhook", "--namespace", "own"], "--image"),
        ([*WEBHOOK, "--port", "70000"], "--port"),
        ([*WEBHOOK, "--por", "1"], "--por"),
        ([*WEBHOOK, "--max-body", "-1"], "--max-body"),
        ([*CONTROLLER, "--poll-interval", "0"], "--poll-interval"),
        ([*CONTROLLER, "--poll-interval", "soon"], "--poll-interval"),
        ([*CONTROLLER, "--watch-namespace", "No Name"], "--watch-namespace"),
        ([*CONTROLLER, "--image", "i"], "--image"),
        (["both"], "both"),
    ],
)
def test_bad_flags_are_refused_by_name(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


# --- logging in to the API server -----------------------------------------------------------------------


def kubeconfig(folder: Path, user: Mapping[str, object], **cluster: object) -> Path:
    path = folder / "config"
    cluster = {"server": "https://127.0.0.1:6443/", **cluster}
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(document))
    return path


def test_a_kubeconfig_logs_in_by_token_or_certificate(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from a file\n")
    (tmp_path / "cert").write_bytes(b"CERT")
    login = read_kubeconfig(kubeconfig(tmp_path, {"token": "t"}))
    assert (login.server, login.token, login.client) == ("https://127.0.0.1:6443", "t", None)
    assert login.is_verified
    assert "t'" not in repr(login)
    from_file = read_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert from_file.token in ("from a file",)
    pair = {"client-certificate": "cert", "client-key-data": base64.b64encode(b"KEY").decode()}
    assert read_kubeconfig(kubeconfig(tmp_path, pair)).client == (b"CERT", b"KEY")
    loose = read_kubeconfig(
        kubeconfig(tmp_path, {"token": "t"}, **{"insecure-skip-tls-verify": True})
    )
    assert not loose.is_verified


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[", "no kubeconfig"),
        ("{}", "current-context"),
        ('{"current-context": "x", "contexts": []}', "no kubeconfig that can be used"),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config"
    with pytest.raises(ConfigurationError, match="set KUBECONFIG"):
        read_kubeconfig(path)
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        read_kubeconfig(path)


def test_a_way_to_log_in_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="exec"):
        read_kubeconfig(kubeconfig(tmp_path, {"exec": {"command": "aws"}}))
    with pytest.raises(ConfigurationError, match="No such file"):
        read_kubeconfig(kubeconfig(tmp_path, {"client-certificate": "missing", "client-key": "k"}))


def test_a_service_account_logs_in_by_its_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_account(tmp_path, "10.96.0.1", "443")
    (tmp_path / "token").write_text("t\n")
    (tmp_path / "ca.crt").write_text("CA")
    login = read_account(tmp_path, "fd00::1", "443")
    assert (login.server, login.token) == ("https://[fd00::1]:443", "t")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        login.tls()


def test_a_login_that_cannot_be_read_again_leaves_the_old_one() -> None:
    logins = iter([Login("https://here")])

    def read() -> Login:
        try:
            return next(logins)
        except StopIteration:
            raise ConfigurationError("half written") from None

    connection = Connection(read)
    connection._read_again(0.0)
    assert connection.server == "https://here"


def test_damage_reaches_the_object_within_five_seconds_by_default() -> None:
    """From the damage to the sidecar's next look, and from there to the operator's: docs/explanation/failures.md."""
    assert WATCH_S + controller().poll_s < 5
