"""The built-in RL job."""
