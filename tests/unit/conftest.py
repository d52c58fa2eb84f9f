"""What unit tests share: how many examples a property is tried with.

A quick run tries few, so that it ends in seconds; new ones each time, so many runs add up. Over a mutant the
same ones are tried each time, so there are some more of them, and nobody looks for the smallest that fails
(``make mutation``). The full count is for soak runs (``--hypothesis-profile=full``), where properties count
among the tests marked `soak`. A property gives no number of its own.
"""

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

# A busy machine may take any time for one example, so neither an example's time nor the speed of
# generating it says anything about the code.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", COMMON, max_examples=30)
settings.register_profile(
    "mutants", COMMON, max_examples=100, phases=(Phase.explicit, Phase.generate)
)
settings.register_profile("full", COMMON, max_examples=1000)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark of a test that tries examples and that hypothesis does not know as its own."""
    config.addinivalue_line("markers", "properties: tries as many examples as the profile says")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have properties run in a soak, at their full count."""
    if config.getoption("--hypothesis-profile") != "full":
        return
    for item in items:
        test = getattr(item, "obj", None)
        if is_hypothesis_test(test) or item.get_closest_marker("properties"):
            item.add_marker(pytest.mark.soak)
            item.add_marker(pytest.mark.timeout(1800))
