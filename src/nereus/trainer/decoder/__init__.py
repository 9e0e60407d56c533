"""The parallel decoder: model, pipeline schedule, gradients, optimizer, generation, Hugging Face directories."""
