"""The schedules of the field, each a function of two integers."""
