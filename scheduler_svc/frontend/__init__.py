"""Text in, text out: all that turns prompts into token ids and token ids into text."""

from scheduler_svc.frontend.answer import AnswerText, TextDelta
from scheduler_svc.frontend.tokenizer import Tokenizer

__all__ = ["AnswerText", "TextDelta", "Tokenizer"]
