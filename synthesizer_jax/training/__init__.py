"""Training: experiments, the training step and loop, runs, and plans of their memory."""
