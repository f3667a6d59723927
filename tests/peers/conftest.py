"""Configures the tests that need PyTorch and transformers, which `make test-peers` installs."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]
