"""Checkpoints of HuggingFace and transformers."""
