"""Reads and writes folders of Hugging Face transformers that hold a T5 or a T5Gemma."""
