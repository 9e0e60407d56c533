"""Transitions measured: their plans, bytes and order, and their execution beside other ways to do the same."""
