"""One file = one admission rule."""
