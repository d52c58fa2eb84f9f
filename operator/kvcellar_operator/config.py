"""What the two programs are told by their command lines: parsed once, refused by name.

Owns: every flag, its default, unit and reason. Nothing else reads arguments or the environment; only the
API server's address and login come from elsewhere (`connection`).
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvcellar import __version__
from kvcellar.errors import ConfigurationError
from kvcellar_operator.profile_reader import parse_profile_spec
from kvcellar_operator.profiles import Profile
from kvcellar_operator.settings import GPU_RESOURCES, InjectSettings

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class Common:
    """What both programs have.

    Attributes:
        namespace: the operator's own.
        watch_namespaces: where pods and profiles are looked at; empty is everywhere.
        health_port: TCP port of health and metrics, plain HTTP.
        log_level: least level of the log lines on stderr.
    """

    namespace: str
    watch_namespaces: tuple[str, ...]
    health_port: int
    log_level: str


@dataclass(frozen=True, slots=True)
class Tls:
    """Where the webhook's certificate comes from.

    Attributes:
        folder: of tls.crt, tls.key and, if the operator is to have it trusted, ca.crt; None makes its own.
        secret: name of the Secret in the own namespace that keeps what is made.
        names: DNS names and addresses that the API server may ask for.
        configuration: name of the MutatingWebhookConfiguration whose caBundle is kept; "" leaves it alone.
    """

    folder: Path | None
    secret: str
    names: tuple[str, ...]
    configuration: str


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """`kvcellar-operator webhook`.

    Attributes:
        common: what both programs have.
        port: TCP port of the webhook; 10250 is open between control plane and nodes nearly everywhere.
        tls: where the certificate comes from.
        max_body_bytes: of a review; the API server itself takes 3 MiB, and a review holds the pod once.
        drain_s: how long requests are still served after SIGTERM, until every node knows that we go.
        inject: what every injection has in common.
    """

    common: Common
    port: int
    tls: Tls
    max_body_bytes: int
    drain_s: float
    inject: InjectSettings


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """`kvcellar-operator controller`.

    Attributes:
        common: what both programs have.
        poll_s: from one look at a sidecar to the next.
        poll_timeout_s: for a sidecar's whole answer.
        poll_body_bytes: of a sidecar's answer.
        poll_at_once: sidecars that are asked at the same time.
        poll_backoff_s: the longest pause after failures.
        small_change_s: how often mere numbers are written that moved by less than 10% of the capacity.
        stale_s: age of the newest list or watch answer after which the probe fails.
    """

    common: Common
    poll_s: float
    poll_timeout_s: float
    poll_body_bytes: int
    poll_at_once: int
    poll_backoff_s: float
    small_change_s: float
    stale_s: float


def parse(argv: Sequence[str]) -> WebhookSettings | ControllerSettings:
    """Read a command line.

    Raises:
        ConfigurationError: a file that cannot be used.
        SystemExit: 2 with a sentence for a bad flag, 0 after --help or --version.
    """
    arguments = _parser().parse_args(argv)
    common = Common(
        namespace=arguments.namespace,
        watch_namespaces=tuple(dict.fromkeys(arguments.watch_namespace)),
        health_port=arguments.health_port,
        log_level=arguments.log_level,
    )
    if arguments.command == "webhook":
        return _webhook(arguments, common)
    return ControllerSettings(
        common=common,
        poll_s=arguments.poll_interval,
        poll_timeout_s=arguments.poll_timeout,
        poll_body_bytes=arguments.poll_max_body,
        poll_at_once=arguments.poll_concurrency,
        poll_backoff_s=arguments.poll_max_backoff,
        small_change_s=arguments.small_change_interval,
        stale_s=arguments.stale_after,
    )


def _webhook(arguments: argparse.Namespace, common: Common) -> WebhookSettings:
    service = f"{arguments.service}.{common.namespace}.svc"
    tls = Tls(
        folder=arguments.tls_dir,
        secret=arguments.tls_secret,
        names=tuple(arguments.tls_name) or (service,),
        configuration=arguments.webhook_configuration,
    )
    inject = InjectSettings(
        image=arguments.image,
        version=__version__,
        image_pull_policy=arguments.image_pull_policy,
        default_profile=_default_profile(arguments.default_profile),
        run_as_user=arguments.run_as_user,
        shared_group=arguments.shared_group,
        gpu_resources=tuple(arguments.gpu_resource) or GPU_RESOURCES,
    )
    return WebhookSettings(
        common=common,
        port=arguments.port,
        tls=tls,
        max_body_bytes=arguments.max_body,
        drain_s=arguments.drain,
        inject=inject,
    )


def _default_profile(path: Path | None) -> Profile:
    if path is None:
        return Profile()
    try:
        spec = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"--default-profile {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--default-profile {path} is no YAML: {error}") from error
    return parse_profile_spec({} if spec is None else spec)


# --- flags ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcellar-operator", description="The cluster side of kvcellar.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_webhook(commands.add_parser("webhook", help="inject the sidecar", allow_abbrev=False))
    _add_controller(
        commands.add_parser("controller", help="keep OffloadRegions true", allow_abbrev=False)
    )
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--namespace", required=True, type=_name, help="the operator's own namespace")
    add(
        "--watch-namespace",
        action="append",
        default=[],
        type=_name,
        metavar="NAME",
        help="look at pods and profiles of this namespace only; may be repeated; default: all",
    )
    add("--health-port", type=_port, default=8081, help="health and metrics (default: 8081)")
    add("--log-level", choices=_LOG_LEVELS, default="INFO", help="least level (default: INFO)")


def _add_webhook(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    add = parser.add_argument
    add("--image", required=True, help="kvcellar's image, for the containers that are injected")
    add("--image-pull-policy", choices=("", "Always", "IfNotPresent", "Never"), default="")
    add(
        "--default-profile",
        type=Path,
        metavar="FILE",
        help="spec of an OffloadProfile in YAML, for pods that name none",
    )
    add(
        "--run-as-user",
        type=_optional_id,
        default=65532,
        help="uid of the injected containers where neither engine nor profile says one; none: the image's",
    )
    add("--shared-group", type=_id, default=65532, help="gid that engine and sidecar share")
    add("--gpu-resource", action="append", default=[], metavar="PATTERN")
    add("--port", type=_port, default=10250, help="HTTPS (default: 10250)")
    add("--max-body", type=_bytes, default=6 * 2**20, help="bytes of a review (default: 6 MiB)")
    add("--drain", type=_seconds, default=5.0, help="seconds to serve after SIGTERM (default: 5)")
    add("--service", type=_name, default="kvcellar-webhook", help="name of the webhook's Service")
    add("--tls-dir", type=Path, help="folder of tls.crt, tls.key, ca.crt; default: make our own")
    add("--tls-secret", type=_name, default="kvcellar-webhook-tls", help="Secret that keeps them")
    add(
        "--tls-name",
        action="append",
        default=[],
        metavar="NAME",
        help="DNS name or address of the certificate; default: <service>.<namespace>.svc",
    )
    add(
        "--webhook-configuration",
        default="",
        metavar="NAME",
        help="MutatingWebhookConfiguration whose caBundle is kept; default: none",
    )


def _add_controller(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    add = parser.add_argument
    add("--poll-interval", type=_seconds, default=3.0, help="seconds (default: 3)")
    add("--poll-timeout", type=_seconds, default=3.0, help="seconds (default: 3)")
    add("--poll-max-body", type=_bytes, default=2**20, help="bytes (default: 1 MiB)")
    add("--poll-concurrency", type=_count, default=32, help="sidecars at once (default: 32)")
    add("--poll-max-backoff", type=_seconds, default=20.0, help="seconds (default: 20)")
    add(
        "--small-change-interval",
        type=_seconds,
        default=60.0,
        help="seconds between writes of numbers that moved by less than 1%% (default: 60)",
    )
    add("--stale-after", type=_seconds, default=300.0, help="seconds (default: 300)")


def _checked(pattern: str, allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} cannot be used: give {allowed}")
        return text

    return check


def _whole(low: int, high: int) -> Callable[[str], int]:
    def check(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"{text!r} cannot be used: give a whole number from {low} to {high}"
            )
        return int(text)

    return check


_name = _checked("[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "a Kubernetes name")
_port = _whole(0, 65535)
_id = _whole(1, 2**31 - 1)
_bytes = _whole(2**10, 2**30)
_count = _whole(1, 1024)


def _optional_id(text: str) -> int | None:
    return None if text == "none" else _id(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text) or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: give seconds above zero")
    return float(text)
