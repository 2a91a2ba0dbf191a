"""Data: sources of rows, prompts and training rows made of them, the resumable stream, and packing."""
