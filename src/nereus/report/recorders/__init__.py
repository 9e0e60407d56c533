"""One file = one sink for what happened."""
