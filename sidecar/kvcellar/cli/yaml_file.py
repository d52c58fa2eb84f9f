"""Manifests as text: read so that every scalar keeps its type, and written so that no text changes its own."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from kvcellar.errors import ConfigurationError

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*|/[A-Za-z0-9_./-]+")
_AMBIGUOUS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class _Loader(yaml.SafeLoader):
    """Kubernetes knows no dates: `2026-01-01` is a text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, and quotes what any reader of YAML might take for a number or a boolean."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _AMBIGUOUS
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def read_documents(source: str) -> list[Any]:
    """The YAML documents of a file, or of stdin for `-`; empty ones are left out.

    Raises:
        ConfigurationError: it cannot be read, or is no YAML.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        documents = list(yaml.load_all(text, _Loader))
    except OSError as error:
        raise ConfigurationError(f"{source} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{source} is no YAML: {' '.join(str(error).split())}") from error
    try:
        json.dumps(documents, default=str, skipkeys=True)
    except ValueError as error:  # an anchor that its own node refers to
        raise ConfigurationError(f"{source} has a node that contains itself") from error
    return [document for document in documents if document is not None]


def written(documents: list[Any]) -> str:
    """The documents as one YAML text."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=float("inf"), allow_unicode=True
    )
