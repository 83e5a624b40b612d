"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# machines that run tests are busy: a slow example is no failing one
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
