"""How short a step can be: bounds, exact optima, the search for a schedule, and the choice of one."""
