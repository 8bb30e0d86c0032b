"""What products hand out: nothing that a message refers to is lost in silence."""

from typing import Any

import pytest

from tests.stages.test_text_formats import Row, assistant, fault, made, user


def tree(**metadata: Any) -> Row:
    """A question, whose message has this metadata, and its answer."""

    def node(role: str, said: str, parent: str | None, about: Row) -> Row:
        content = {"content_type": "text", "parts": [said]}
        return {"message": {"author": {"role": role}, "content": content, "metadata": about}, "parent": parent}

    nodes = {"u": node("user", "what is in it?", None, metadata), "a": node("assistant", "a cat", "u", {})}
    return {"mapping": nodes, "current_node": "a"}


def test_what_is_attached_to_a_message_of_chatgpt_is_named() -> None:
    asked = [user("what is in it?"), assistant("a cat")]
    file = {"id": "file-1", "name": "secret.pdf", "mime_type": "application/pdf", "size": 3}
    assert fault(tree(attachments=[file])) == ("attachment", "mapping.metadata.attachments", "list")
    for none in ([], None):
        assert made(tree(attachments=none))["messages"] == asked
    wordless = tree(attachments=[file])
    wordless["mapping"]["u"]["message"]["content"]["parts"] = [""]
    assert fault(wordless)[0] == "attachment"
    hidden = tree(attachments=[file], is_visually_hidden_from_conversation=True)
    assert made(hidden)["messages"] == asked[1:]
    answered = tree()
    answered["mapping"]["a"]["message"]["metadata"] = {"attachments": [file]}
    assert fault(answered)[0] == "attachment"


@pytest.mark.parametrize("type", ["tether_quote", "code"])
def test_what_a_user_says_in_another_form_than_text_is_named(type: str) -> None:
    row = tree()
    row["mapping"]["u"]["message"]["content"] = {"content_type": type, "text": "secret"}
    assert fault(row) == ("unsupported_content_part", "mapping", type)
    row["mapping"]["u"]["message"]["content"]["content_type"] = "user_editable_context"  # his standing instructions
    assert made(row)["messages"] == [assistant("a cat")]
