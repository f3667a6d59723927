"""Exports models as StableHLO programs, which run without this package."""
