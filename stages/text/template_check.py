"""Whether a chat template fits the data, tried on a few chats before thousands are worked on. Apart from encoding, because it
looks at the ids alone: decoded, what is learned must be what the assistant says, and the end of its turn.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.contract import StageError
from stages.text.choices import LossOn

if TYPE_CHECKING:
    from stages.text.templates import Chat, Encoded, Template

SAMPLES = 20
FIXES = {
    "arguments_not_json": "the arguments of a call must be a JSON object, or one written as text",
    "answer_altered": "the template changes what the assistant says; bring another template",
    "answer_unmarked": "the template's {% generation %} marks leave out turns of the assistant; take the marks out",
    "answer_within_token": "the tokenizer joins the template's words with the answer's; end the template's with a control token",
    "content_lost": "the template leaves out messages; bring another template, or take those messages out",
    "control_lost": "the tokenizer does not read control tokens where the template writes them; their `normalized` in "
    "tokenizer.json must be false",
    "control_strings": "the words of control tokens stand in messages; stages.tokenize.control_strings=neutralise takes them as text",
    "history_rewritten": "the template writes earlier turns otherwise once later ones follow (reasoning that it drops); "
    "set stages.tokenize.loss_on=last",
    "mark_within_token": "the template's {% generation %} marks end within a token; take the marks out",
    "not_unicode": "the text holds lone surrogates; save it as UTF-8",
    "no_answer": "there is no turn of the assistant; set stages.tokenize.loss_on=all or bring other data",
    "no_messages": "the chat is empty",
    "prompt_differs": "the template opens a turn of the assistant otherwise than it writes one; bring another template",
    "system_unsupported": "the template has no system turns; put their text into the first user turn, or bring another template",
    "template_refused": "the template refuses these roles or their order; bring another template or other data",
    "tools_unsupported": "the template has no tools; bring another template, or take tools and their calls out of the data",
    "too_many_turns": "the chat is too long to find each answer in it; cut it into several, or set stages.tokenize.loss_on=all",
    "turn_without_end": "the template ends turns of the assistant with no control token; bring another template",
}
"""Every reason that a chat may have, and what to do."""


def check(template: "Template", chats: Sequence["Chat"], loss_on: LossOn) -> dict[str, Any]:
    """Facts for the summary. StageError when nothing can be trained on, or a mask is not what it must be."""
    if loss_on is not LossOn.all and not template.renderer.traits.endings:
        raise StageError(_endless(template))
    chats = chats[:SAMPLES]
    encoded = template.encode_batch(chats, loss_on)
    reasons = Counter(result.reason for result in encoded if result.reason)
    if chats and len(encoded) == reasons.total():
        reason, count = reasons.most_common(1)[0]
        raise StageError(
            f"the chat template takes none of the first {len(chats)} chats: {count} of them {reason} ({FIXES[reason]})"
        )
    for (messages, _), result in zip(chats, encoded, strict=True):
        if result.reason is None:
            _require_one_begin(template, result)
            if loss_on is not LossOn.all:
                _require_answers(template, messages, result, loss_on)
    endings = template.renderer.traits.endings
    return {"endings": list(endings), "terminators": template.terminators, "refused": dict(sorted(reasons.items()))}


def _endless(template: "Template") -> str:
    behind = template.renderer.traits.behind
    if behind is None:
        return f"the chat template does not write what the assistant says ({FIXES['answer_altered']})"
    token = re.match(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])", behind)
    if token is None:
        return (
            "the chat template ends turns of the assistant with no token, so a model would never learn to stop; write "
            "eos_token behind them, or set stages.tokenize.chat_template to a built-in one (zephyr fits every tokenizer)"
        )
    return (
        f"the chat template ends turns of the assistant with {token[1][:40]!r}, which is no control token of this tokenizer, so "
        "a model could not stop there; add it (stages.tokenize.add_control_tokens), or set stages.tokenize.chat_template to a built-in "
        "one (zephyr fits every tokenizer)"
    )


def _require_one_begin(template: "Template", result: "Encoded") -> None:
    begin = template.renderer.control.ids.get(template.renderer.special_tokens.get("bos_token", ""))
    if begin is not None and result.ids[:2].tolist() == [begin, begin]:
        raise StageError("the chat template writes the begin token twice; take one out")


def _require_answers(template: "Template", messages: list[dict[str, Any]], result: "Encoded", loss_on: LossOn) -> None:
    """Each turn to learn, decoded, ends with a token that ends turns, and holds the words of one message of the assistant."""
    wanted = [message for message in messages if message["role"] == "assistant"]
    wanted = wanted if loss_on is LossOn.assistant else wanted[-1:]
    learned = np.where(result.labelled, result.ids, -1)
    ends = np.flatnonzero(np.isin(learned, template.terminators))
    turns = np.split(learned, ends + 1)
    if len(turns) != len(wanted) + 1 or (turns[-1] >= 0).any():
        raise StageError(
            "the chat template's turns cannot be told apart by the tokens that end them; bring another template"
        )
    for message, turn in zip(wanted, turns, strict=False):
        said = message.get("content") or ""
        said = said if isinstance(said, str) else "".join(part["text"] for part in said)
        found = _squeezed(template.tokenizer.decode(turn[turn >= 0][:-1].tolist(), skip_special_tokens=False))
        if not any(_plain(template, part) in found for part in (said, said.rpartition("</think>")[2])):
            raise StageError(
                "decoding what is to be learned does not give what the assistant says; bring another template"
            )


def _plain(template: "Template", text: str) -> str:
    """As the tokenizer gives it back."""
    ids = template.tokenizer.encode(text.strip(), add_special_tokens=False).ids
    return _squeezed(template.tokenizer.decode(ids, skip_special_tokens=False))


def _squeezed(text: str) -> str:
    return "".join(text.split())
