"""Training: experiments, the training step and loop, run directories, and memory plans."""
