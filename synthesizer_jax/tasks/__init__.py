"""Tasks: T5's and the papers', of SeqIO's registries and users' files."""
