"""The ledger: the experiments of the papers over several seeds, and the page docs/results.md.

Nothing else in the repository uses it. Skip it unless you want to repeat or extend the results. It
has these modules:

- `tables` reads docs/results.toml, which defines the tables, and lists the runs that they need;
- `data` makes the data sets and vocabularies of the runs;
- `runs` makes the runs, measures speeds, and adds both to docs/results.json;
- `computed` computes metrics that need no run, and `speed` times training steps and decoding;
- `page` writes docs/results.md and its picture from these numbers.

``python -m benchmarks.ledger`` is the command.
"""
