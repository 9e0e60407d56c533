"""Measurements on real processes, each a command of its own."""
