"""``scripts/generate``: text from a run's checkpoint, or from published weights."""
