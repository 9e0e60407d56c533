"""What the paper states, as tests."""
