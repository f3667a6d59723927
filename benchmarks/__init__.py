"""Contains scripts that measure speed and reliability, and a package that repeats experiments."""
