"""One file = one source of devices."""
