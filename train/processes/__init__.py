"""One run in several processes: how they start, find, watch and end one another."""
