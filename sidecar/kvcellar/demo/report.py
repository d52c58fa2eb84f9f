"""What a demo has checked: one line each, with a figure, and whether all of it held."""

import sys
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Check:
    """One statement that was tested, the figure behind it, and whether it held."""

    statement: str
    figure: str
    is_ok: bool


@dataclass(slots=True)
class Report:
    """Collects checks, tells progress on stderr, and prints the table on stdout at the end."""

    checks: list[Check] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def check(self, statement: str, figure: str, *, is_ok: bool) -> None:
        """Note a check; a failed one does not stop the demo, so that one run shows all."""
        self.checks.append(Check(statement, figure, is_ok))
        self.say(f"{'ok    ' if is_ok else 'FAILED'} {statement}: {figure}")

    def say(self, what: str) -> None:
        """One line of progress, with the seconds since the start."""
        sys.stderr.write(f"[{time.monotonic() - self.began:6.1f} s] {what}\n")
        sys.stderr.flush()

    @property
    def all_held(self) -> bool:
        """Whether there were checks and every one held."""
        return bool(self.checks) and all(check.is_ok for check in self.checks)

    def table(self) -> str:
        """All checks as text, one a line."""
        width = max((len(check.statement) for check in self.checks), default=0)
        lines = [
            f"  {'ok    ' if check.is_ok else 'FAILED'}  {check.statement:<{width}}  {check.figure}"
            for check in self.checks
        ]
        return "\n".join(lines)


def mib(size_bytes: float) -> str:
    """Bytes as MiB, for people."""
    return f"{size_bytes / 2**20:.1f} MiB"
