"""A better and a worse answer to one prompt. Apart, because files write the prompt in four ways: once for both, in front of
each answer, both, or nowhere but in the answers."""

import re
from dataclasses import dataclass
from typing import Any

from stages.text.chats import Message, Texts, hold_messages, messages
from stages.text.faults import Fault


@dataclass(frozen=True)
class Pair:
    """Messages of the prompt, and the messages that complete it."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def pair(prompt: Any, chosen: Any, rejected: Any, better: str, worse: str, texts: Texts) -> Pair:
    """`better` and `worse` are the fields' names. What both answers begin with belongs to the prompt. Raises Fault."""
    if prompt is None and (both := [_transcript(answer) for answer in (chosen, rejected)]) and all(both):
        chosen, rejected = both
    if all(isinstance(answer, str | bytes) and not hold_messages(answer) for answer in (chosen, rejected)):
        found = _of_strings(prompt, texts.take(chosen, better), texts.take(rejected, worse), texts)
    else:
        prompt = None if prompt in ("[]", b"[]") else prompt
        found = _of_messages(prompt, messages(chosen, better, texts), messages(rejected, worse, texts), texts)
    for answer, field in ((found.chosen, better), (found.rejected, worse)):
        if not answer or not (answer[-1]["content"].strip() or answer[-1].get("tool_calls")):
            raise Fault("empty_answer", field)
        if answer[-1]["role"] != "assistant":
            raise Fault("role_order", field, "the last message is not the assistant's")
    if found.chosen == found.rejected:
        raise Fault("same_answers", worse)
    if not found.prompt:
        raise Fault("two_prompts", worse, "no prompt and no beginning in common")
    return found


def _transcript(value: Any) -> list[dict[str, str]] | None:
    """The messages of a chat that is written as one string, as HH-RLHF has it."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman: "):
        return None
    said = re.split(r"\n\n(Human|Assistant):", value)[1:]
    return [
        {"role": speaker.lower(), "content": text.removeprefix(" ")}
        for speaker, text in zip(said[::2], said[1::2], strict=True)
    ]


def _of_strings(prompt: Any, chosen: str, rejected: str, texts: Texts) -> Pair:
    before = _asked(prompt, texts)
    if chosen == rejected:
        raise Fault("same_answers")
    if not before:
        shared = _shared(chosen, rejected)
        before = [{"role": "user", "content": shared}] if shared.strip() else []
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
    return Pair(before, [{"role": "assistant", "content": chosen}], [{"role": "assistant", "content": rejected}])


def _shared(chosen: str, rejected: str) -> str:
    """What two texts begin with, up to where the last speaker begins, or else the last line, or else the last word."""
    end = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
    )
    shared = chosen[:end]
    for mark in ("\n\nAssistant:", "\n", " "):
        if (at := shared.rfind(mark)) >= 0:
            return shared[: at + len(mark)]
    return ""


def _of_messages(prompt: Any, chosen: list[Message], rejected: list[Message], texts: Texts) -> Pair:
    before = _asked(prompt, texts)
    shared = 0
    # The last message of each is the answer, even when both begin with the same words.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if chosen == rejected:
        raise Fault("same_answers")
    head, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if head[-len(before) :] == before or head[: len(before)] == before:
        return Pair(head or before, chosen, rejected)
    if head and any(message["role"] == "user" for message in head):
        raise Fault("two_prompts", "prompt", "the answers begin with another prompt")
    return Pair([*before, *head], chosen, rejected)


def _asked(prompt: Any, texts: Texts) -> list[Message]:
    if prompt is None or prompt == "" or prompt == []:
        return []
    if isinstance(prompt, str | bytes) and not hold_messages(prompt):
        return [{"role": "user", "content": texts.take(prompt, "prompt")}]
    return messages(prompt, "prompt", texts)
