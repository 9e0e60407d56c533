"""The parallel decoder: model, pipeline schedule, generation, loading and saving."""
