"""Tests that take minutes and need a model from the package index."""
