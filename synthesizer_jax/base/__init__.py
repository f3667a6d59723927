"""What every package stands on: configurations as JSON, files, messages, types."""
