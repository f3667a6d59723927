"""Tasks and mixtures from T5, from other papers, from SeqIO's registries, and from users' files."""
