"""Nereus keeps an RL post-training job for LLMs on its best parallel layout while it runs."""

__version__ = "0.1.0"
