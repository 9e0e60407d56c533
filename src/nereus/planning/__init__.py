"""Candidates → frontier → plan."""
