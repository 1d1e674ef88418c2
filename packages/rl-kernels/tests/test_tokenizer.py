import pytest

from rl_kernels.demo.tokenizer import EOS, VOCAB, decode, encode


@pytest.mark.parametrize("text", ["", "4192=", "naïve ✓ 日本", "\x00\x7f\n"])
def test_a_text_survives_the_round_trip(text):
    ids = encode(text)
    assert all(0 <= token < 256 for token in ids)
    assert decode(ids) == text


def test_every_byte_is_a_token_and_the_end_is_none():
    assert [*range(256), EOS] == list(range(VOCAB))


def test_decoding_stops_at_the_end():
    assert decode([*encode("12"), EOS, *encode("3")]) == "12"


def test_bytes_that_are_no_text_are_marked():
    assert decode([0xFF, *encode("a")]) == "\N{REPLACEMENT CHARACTER}a"
