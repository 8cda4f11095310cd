"""Profile steps: record a trace, measure its timeline beside the simulated schedule, and derive the units' costs."""

from dualpipe_jax.profile.capture import Profiler, read_events
from dualpipe_jax.profile.match import ProfileError
from dualpipe_jax.profile.measure import Measured, measure
from dualpipe_jax.profile.write import write_profile

__all__ = ["Measured", "ProfileError", "Profiler", "measure", "read_events", "write_profile"]
