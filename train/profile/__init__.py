"""Steps profiled: a trace, the timeline measured from it beside the schedule's theory, and the costs of its units."""

from train.profile.capture import Profiler
from train.profile.match import ProfileError
from train.profile.measure import Measured, measure
from train.profile.write import write_profile

__all__ = ["Measured", "ProfileError", "Profiler", "measure", "write_profile"]
