"""From a schedule to the table of integers that the engine reads."""
