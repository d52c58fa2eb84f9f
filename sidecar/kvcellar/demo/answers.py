"""What an engine says: of its start, to a request, and when its counters are read."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """What an engine says of its start.

    Attributes:
        version: vLLM's.
        import_s: until its front end had imported vLLM.
        start_s: until it could serve.
    """

    version: str
    import_s: float
    start_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's result.

    Attributes:
        token_ids: the tokens that were generated.
        cached_tokens: prompt tokens that came from the device's cache or a connector.
        finish_reason: "length", or "error" when vLLM gave the request up.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """A reading of vLLM's counters.

    Attributes:
        samples: (name, labels, value), names as Prometheus shows them (``..._total``).
    """

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples with that name and those labels; 0 when there is none."""
        return sum(
            value
            for sample, have, value in self.samples
            if sample == name and labels.items() <= have.items()
        )

    def names(self) -> set[str]:
        """All names that occur."""
        return {name for name, _, _ in self.samples}
