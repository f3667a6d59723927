"""Tasks and mixtures of T5, of other papers, of SeqIO's registries, and of users' files."""
