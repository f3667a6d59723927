"""`python -m synthesizer_jax` is the command `synthesizer-jax`."""

from synthesizer_jax.cli.main import main

if __name__ == "__main__":
    main()
