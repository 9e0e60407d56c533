"""One file = one source of prompts and rewards."""
