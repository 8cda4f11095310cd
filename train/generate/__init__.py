"""``scripts/generate``: generate text with a run's checkpoint, or with published weights."""
