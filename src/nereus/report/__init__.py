"""What a person sees: live view, summaries, tables."""
