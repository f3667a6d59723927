"""Repeats the experiments of the papers over several seeds, and writes docs/results.md.

Nothing else in the repository uses this package. Skip it unless you want to repeat or extend the
results. The package has these modules:

- `tables` reads docs/results.toml, which defines the tables, and lists the runs that they need;
- `data` makes the data sets and vocabularies of the runs;
- `runs` makes the runs, measures speeds, and adds both to docs/results.json;
- `computed` computes metrics that need no run, and `speed` times training steps and decoding;
- `page` writes docs/results.md and its picture from these numbers.

Run ``python -m benchmarks.ledger`` to use the package.
"""
