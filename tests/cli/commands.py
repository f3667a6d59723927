"""The command line in this process."""

from typer.testing import CliRunner

from synthesizer_jax.cli.main import app


def ended(*arguments: object) -> tuple[int, str]:
    """The exit code of a command, and what it prints; errors are raised."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def call(*arguments: object) -> str:
    """What a command prints that succeeds."""
    code, output = ended(*arguments)
    assert code == 0, output
    return output
