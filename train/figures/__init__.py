"""What a run reports about itself: the figures of its steps, its rates, and the trackers that receive them."""
