"""Schedules and timelines as text, files and pictures."""
