"""Folders of Hugging Face transformers that hold a T5."""
