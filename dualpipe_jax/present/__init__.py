"""How numbers, tables and figures look, wherever they stand. Knows nothing of schedules, programs or experts."""
