"""Seconds and bytes of a call, a step, a transition; calibration."""
