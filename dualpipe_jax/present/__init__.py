"""The form of numbers, tables and figures in all output. Knows nothing of schedules, programs or experts."""
