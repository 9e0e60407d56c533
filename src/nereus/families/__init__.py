"""One file = one architecture: sizes and how TP and PP cut each tensor."""
