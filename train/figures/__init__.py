"""What a run tells of itself: the figures of its steps, its rates, and who is told."""
