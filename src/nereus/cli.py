"""The verbs (the only typer)."""


def main() -> None:
    """Entry point of the `nereus` command."""
