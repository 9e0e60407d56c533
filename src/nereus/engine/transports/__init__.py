"""One file = one way to move bytes between devices."""
