"""What unit tests share."""

from hypothesis import HealthCheck, settings

# A busy machine may take any time for one example, so neither an example's time nor the speed of
# generating it says anything about the code.
settings.register_profile("kvcellar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvcellar")
