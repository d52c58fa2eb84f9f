"""What a check says: a verdict, what was found, and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """Something works less well, or cannot be told from here."""
    PROBLEM = "problem"
    """A sidecar or an engine would not have its region."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. `remedy` is empty where all is well."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def fine(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Somebody should know."""
    return Finding(check, Verdict.WARNING, found, remedy)


def problem(check: str, found: str, remedy: str) -> Finding:
    """Somebody has to act."""
    return Finding(check, Verdict.PROBLEM, found, remedy)
