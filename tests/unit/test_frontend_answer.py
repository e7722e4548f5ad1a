"""The text of one answer: characters stay whole, stops are cut, nothing comes after the end."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from scheduler_svc.frontend import AnswerText, TextDelta, Tokenizer

END = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and `<end>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, special_tokens={}, chat_template=None)


def start(
    tokenizer: Tokenizer, *stop_strings: str, skip_special_tokens: bool = True, include_stop: bool = False
) -> AnswerText:
    return AnswerText(
        tokenizer, skip_special_tokens=skip_special_tokens, stop_strings=stop_strings, include_stop=include_stop
    )


@pytest.mark.parametrize("text", ["สวัสดีครับ", "a👩‍👩‍👧‍👦b", "🇹🇭", "e\u0301"])
def test_characters_come_whole_byte_by_byte(tokenizer: Tokenizer, text: str) -> None:
    answer = start(tokenizer)
    deltas = [answer.push([token_id]).text for token_id in tokenizer.encode(text)]
    assert [delta for delta in deltas if delta] == list(text)
    assert answer.finish() == ""


def test_an_unfinished_character_at_the_end_is_replaced_once(tokenizer: Tokenizer) -> None:
    answer = start(tokenizer)
    half_emoji = tokenizer.encode("a👍")[:3]
    assert answer.push(half_emoji) == TextDelta("a")
    assert answer.finish() == "\ufffd"
    assert answer.finish() == ""
    assert answer.push(half_emoji) == TextDelta()


def test_half_a_character_of_the_prompt_stays_out(tokenizer: Tokenizer) -> None:
    prompt_ids, answer_ids = tokenizer.encode("ก")[:2], tokenizer.encode("กข")[2:]
    assert tokenizer.decode(prompt_ids + answer_ids, skip_special_tokens=True) == "กข"
    answer = start(tokenizer)
    assert answer.push(answer_ids).text + answer.finish() == "\ufffdข"


@pytest.mark.parametrize(
    ("skip_special_tokens", "include_stop", "text"),
    [(True, False, "hi"), (False, False, "hi"), (True, True, "hi"), (False, True, "hi<end>")],
)
def test_the_stop_token_is_shown_when_asked_for(
    tokenizer: Tokenizer, skip_special_tokens: bool, include_stop: bool, text: str
) -> None:
    answer = start(tokenizer, skip_special_tokens=skip_special_tokens, include_stop=include_stop)
    token_ids = [*tokenizer.encode("hi"), END]
    assert answer.push(token_ids, ends_with_stop_token=True).text + answer.finish() == text


def test_special_tokens_inside_are_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("a"), END, *tokenizer.encode("b")]
    assert start(tokenizer).push(token_ids).text == "ab"
    assert start(tokenizer, skip_special_tokens=False).push(token_ids).text == "a<end>b"


@pytest.mark.parametrize(("include_stop", "text"), [(False, "one"), (True, "one\n\n")])
def test_a_stop_string_cuts_what_follows(tokenizer: Tokenizer, include_stop: bool, text: str) -> None:
    answer = start(tokenizer, "\n\n", include_stop=include_stop)
    first = answer.push(tokenizer.encode("one\n"))
    assert first == TextDelta("one")
    second = answer.push(tokenizer.encode("\ntwo"))
    assert first.text + second.text == text
    assert second.matched_stop == answer.matched_stop == "\n\n"
    assert answer.push(tokenizer.encode("three")) == TextDelta()
    assert answer.finish() == ""
    assert answer.matched_stop == "\n\n"


def test_what_was_held_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    answer = start(tokenizer, "</s>")
    assert answer.push([*tokenizer.encode("a</s"), END], ends_with_stop_token=True) == TextDelta("a")
    assert answer.finish() == "</s"
    assert answer.matched_stop is None


def test_a_stop_string_may_be_found_at_the_very_end() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<0x0A>": 1}, unk_token="a"))
    backend.decoder = decoders.ByteFallback()
    answer = start(Tokenizer(backend, special_tokens={}, chat_template=None), "\n")
    assert answer.push([0, 1, 1]) == TextDelta("a")  # byte tokens wait for the end of their run
    assert answer.finish() == ""
    assert answer.matched_stop == "\n"
