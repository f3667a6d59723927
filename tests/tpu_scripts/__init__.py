"""Tests of the scripts that launch on TPUs."""
