"""What decoding may be asked for."""

import pytest

from synthesizer_jax.inference import Decoding


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length is 0; allowed: 1 to 1,048,576"),
        ({"max_length": 10**9}, "max_length is 1000000000; allowed: 1 to 1,048,576"),
        ({"min_length": 0}, "min_length is 0; allowed: 1 or more"),
        ({"min_length": 9}, "min_length is 9; allowed: at most max_length, 8"),
        ({"relative_length": 0.0}, "relative_length is 0.0; allowed: above 0"),
        ({"beams": 10**9}, "beams is 1000000000; allowed: 1 to 1,024"),
        ({"beams": 1.5}, "beams is 1.5, expected int"),
        ({"beams": 2, "alpha": -0.1}, "alpha is -0.1; allowed: 0 or more"),
        ({"temperature": -1.0}, r"temperature is -1.0; allowed: 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature is nan, expected float"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0; allowed: 1 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0; allowed: above 0, at most 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5; allowed: above 0, at most 1"),
        ({"samples": 0}, "samples is 0; allowed: 1 to 1,024"),
        ({"seed": -1}, "seed is -1; allowed: 0 to 4,294,967,295"),
        (
            {"beams": 2, "temperature": 1.0},
            "temperature is 1.0 with beams 2; beam search does not sample: give temperature 0",
        ),
        ({"top_k": 5}, "top_k is 5 with temperature 0, which does not sample; give a temperature"),
        ({"top_p": 0.5}, "top_p is 0.5 with temperature 0, which does not sample"),
        ({"samples": 2}, "samples is 2 with beams 1 and temperature 0; give .* or 2 beams or more"),
        ({"samples": 5, "beams": 4}, "samples is 5 with beams 4 .* or 5 beams or more"),
    ],
)
def test_an_error_is_one_sentence(options, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        Decoding(**{"max_length": 8} | options)
    assert len(str(error.value).splitlines()) == 1


def test_settings_that_go_together_are_accepted():
    options = {"min_length": 8, "temperature": 0.1, "top_k": 1, "top_p": 1.0, "samples": 9}
    assert Decoding(max_length=8, seed=7, **options).samples == 9
    assert Decoding(max_length=8, relative_length=2, beams=4, alpha=0, samples=4).samples == 4
