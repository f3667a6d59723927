"""Measurements of speed and reliability, and the ledger of the results of the papers."""
