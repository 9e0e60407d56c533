"""The loop, the pure brain, the monitor's signals and horizons."""
