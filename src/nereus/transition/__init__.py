"""Units now and a target → placed goal, primitives, schedule, memory check, routes, estimate. Pure."""

from nereus.transition.routes import alias_source, aliased, goal_units, local_copies, moves_of, routes, source_units

__all__ = ["alias_source", "aliased", "goal_units", "local_copies", "moves_of", "routes", "source_units"]
