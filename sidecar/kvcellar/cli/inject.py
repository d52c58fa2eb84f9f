"""`kvcellar inject -f FILE`: what the webhook would make of a manifest, without a cluster."""

import sys
from dataclasses import dataclass, replace
from typing import Any

from kvcellar import __version__
from kvcellar.cli.yaml_file import read_documents, written
from kvcellar.contract import PROFILE_KIND, printable
from kvcellar.errors import ConfigurationError
from kvcellar_operator.explain import decision_table, explain, sizing_sums
from kvcellar_operator.inject import InjectSettings, Profile, parse_profile, parse_profile_spec
from kvcellar_operator.manifests import TEMPLATES, Decision, Injector

DEFAULT_IMAGE = f"kvcellar:{__version__}"
"""As the chart makes it of its own defaults."""


@dataclass(frozen=True, slots=True)
class InjectOptions:
    """What stands on the command line.

    Attributes:
        file: the manifest; `-` is stdin.
        profile_file: OffloadProfiles, or the spec of one; empty: none.
        namespace: of objects that name none.
        image: kvcellar's, for what is injected.
        capacity: instead of the profile's; empty: the profile's.
    """

    file: str
    profile_file: str = ""
    namespace: str = "default"
    image: str = DEFAULT_IMAGE
    capacity: str = ""


def run(options: InjectOptions, *, is_explained: bool) -> int:
    """Print the manifest as it would be admitted, or why it would be so.

    Raises:
        ConfigurationError: a file that cannot be used, or a profile that is none.
    """
    documents = read_documents(options.file)
    if not documents:
        raise ConfigurationError(f"{options.file} holds no object: give a manifest")
    injector = _injector(options, documents)
    done = [injector.inject(document) for document in documents]
    if is_explained:
        sys.stdout.write(_explained([one for _, decided in done for one in decided]))
    else:
        sys.stdout.write(written([document for document, _ in done]))
    return 0


def _injector(options: InjectOptions, documents: list[Any]) -> Injector:
    given = read_documents(options.profile_file) if options.profile_file else []
    profiles = {
        _key(body): _sized(parse_profile(body), options.capacity)
        for body in [*documents, *given]
        if isinstance(body, dict) and body.get("kind") == PROFILE_KIND
    }
    settings = InjectSettings(
        image=options.image,
        version=__version__,
        default_profile=_sized(_default_profile(given), options.capacity),
    )
    return Injector(settings, options.namespace, profiles)


def _default_profile(given: list[Any]) -> Profile:
    """What pods get that name none, and have no `default`: the one profile of --profile."""
    if len(given) != 1:
        return Profile()
    (body,) = given
    if not isinstance(body, dict):
        return parse_profile_spec(body)
    # Without a kind it is a spec, at its own level or under its name.
    return parse_profile(body) if "kind" in body else parse_profile_spec(body.get("spec", body))


def _key(body: dict[str, Any]) -> tuple[str, str]:
    profile = parse_profile(body)
    return str(body["metadata"].get("namespace") or ""), profile.name


def _sized(profile: Profile, capacity: str) -> Profile:
    if not capacity:
        return profile
    return replace(profile, capacity=parse_profile_spec({"capacity": capacity}).capacity)


def _explained(decisions: list[Decision]) -> str:
    if not decisions:
        return f"no pod in it: of {', '.join(sorted(TEMPLATES))} there is none\n"
    return "\n".join(_explanation(decision) for decision in decisions)


def _explanation(decision: Decision) -> str:
    injection = decision.injection
    parts = {"asked:": decision_table(injection.reason), "sizing:": sizing_sums(injection.pod)}
    lines = [f"{decision.owner}: {explain(injection)}".rstrip("\n")]
    for title, text in parts.items():
        lines += [title, *text.splitlines()] if text else []
    return "\n".join(map(printable, lines[0].split("\n") + lines[1:])) + "\n"
