"""Repeats the experiments of the papers over several seeds, and writes docs/results.md.

Nothing else in the repository uses this package. You only need it to repeat or extend the results.
The package has these modules:

- `tables` reads the definitions of tables in docs/results.toml, and lists the runs they need;
- `data` makes the data sets and vocabularies of the runs;
- `runs` makes the runs, measures speeds, and adds the results to docs/results.json;
- `computed` computes metrics that need no run, and `speed` times training steps and decoding;
- `page` writes docs/results.md and its picture from the numbers in docs/results.json.

Run ``python -m benchmarks.ledger`` to use the package.
"""
