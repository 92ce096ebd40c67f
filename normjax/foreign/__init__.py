"""Checkpoints of others, read into our decoder: Hugging Face folders and GGUF files."""
