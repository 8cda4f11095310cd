"""Steps profiled: a trace, the timeline measured from it next to the schedule's theory, and the costs of its units."""

from dualpipe_jax.profile.capture import Profiler, read_events
from dualpipe_jax.profile.match import ProfileError
from dualpipe_jax.profile.measure import Measured, measure
from dualpipe_jax.profile.write import write_profile

__all__ = ["Measured", "ProfileError", "Profiler", "measure", "read_events", "write_profile"]
