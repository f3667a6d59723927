"""Tasks and mixtures: T5's, those of other papers, of SeqIO's registries, and of users' files."""
