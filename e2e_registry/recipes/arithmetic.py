"""Sums of two numbers as text: a character tokenizer, problems, and a reward that checks the answer.

In small what verifiable rewards are for mathematics and code: a program judges the response, and nothing is learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from e2e_registry.errors import UsageError


class CharacterTokenizer:
    """One token a character, and two that are none: padding, and the end of a response."""

    CHARACTERS = "0123456789+="
    PAD = len(CHARACTERS)
    END = PAD + 1
    SIZE = END + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            UsageError: A character is not in the vocabulary.
        """
        unknown = sorted(set(text) - set(self.CHARACTERS))
        if unknown:
            raise UsageError(f"no token for {unknown} in {text!r}", hint=f"the characters are {self.CHARACTERS!r}")
        return [self.CHARACTERS.index(character) for character in text]

    def decode(self, ids: Iterable[int]) -> str | None:
        """Return the text before the end of a response; None if it does not end, or holds padding before its end."""
        characters: list[str] = []
        for token in ids:
            if token == self.END:
                return "".join(characters)
            if token == self.PAD:
                return None
            characters.append(self.CHARACTERS[token])
        return None


class Problem(NamedTuple):
    """A sum to find."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the policy is given."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """What it should say."""
        return str(self.left + self.right)


@dataclass(frozen=True)
class ArithmeticTask:
    """All sums of two numbers from 0 to ``largest``, as token ids.

    Prompts are padded on the left, so that every response begins in the same column; responses on the right.
    """

    largest: int
    tokenizer: ClassVar[CharacterTokenizer] = CharacterTokenizer()

    @property
    def prompt_width(self) -> int:
        """Tokens of the longest prompt."""
        return len(Problem(self.largest, self.largest).prompt)

    @property
    def response_width(self) -> int:
        """Tokens of the longest answer, with its end."""
        return len(Problem(self.largest, self.largest).answer) + 1

    def draw(self, count: int, generator: torch.Generator) -> list[Problem]:
        """Return ``count`` problems, each equally likely."""
        pairs = torch.randint(self.largest + 1, (count, 2), generator=generator)
        return [Problem(left, right) for left, right in pairs.tolist()]

    def encode_prompts(self, problems: Sequence[Problem]) -> Tensor:
        """Return ids of shape ``(problems, prompt_width)``, int64."""
        rows = [self.tokenizer.encode(problem.prompt) for problem in problems]
        return torch.tensor([[self.tokenizer.PAD] * (self.prompt_width - len(row)) + row for row in rows])

    def encode_answers(self, problems: Sequence[Problem]) -> Tensor:
        """Return ids of shape ``(problems, response_width)``, int64, each answer followed by its end."""
        rows = [[*self.tokenizer.encode(problem.answer), self.tokenizer.END] for problem in problems]
        return torch.tensor([row + [self.tokenizer.PAD] * (self.response_width - len(row)) for row in rows])

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        """Return 1 for the answer, ``1 / (1 + distance)`` for another number, 0 for what is no number.

        Graded, so that groups differ in reward while the policy still answers few problems. A number is what Python
        would write: no sign, no leading zeros, and an end.
        """
        text = self.tokenizer.decode(response)
        if text is None or not text.isdigit() or str(int(text)) != text:
            return 0.0
        return 1.0 / (1.0 + abs(int(text) - int(problem.answer)))

    def rewards(self, problems: Sequence[Problem], responses: Tensor) -> Tensor:
        """Return the reward of each response, float32 of shape ``(n,)``.

        Args:
            problems: One for each response.
            responses: Ids of shape ``(n, response_width)``.
        """
        pairs = zip(problems, responses.tolist(), strict=True)
        return torch.tensor([self.reward(problem, response) for problem, response in pairs])
