"""Reads and writes folders of Hugging Face transformers that hold a T5, T5Gemma or T5Gemma 2."""
