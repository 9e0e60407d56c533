"""Units now + target → place, decompose, schedule, fit, routes."""
