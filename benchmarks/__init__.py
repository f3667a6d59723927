"""Measures speed and reliability, and reproduces the results of the papers in a ledger."""
