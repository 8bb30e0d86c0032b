"""From a well-formed request to token ids and sampling that this model can honour. Apart from the app, because these rules
need the model (context length, chat template, vocabulary), and they must refuse before anything is queued."""

from stages.serving.model import LoadedModel
from stages.serving.protocol import ApiError, ChatRequest, CompletionRequest, Request
from stages.serving.sampling import Sampling
from stages.text.rendering import ChatRefused


def tokenize(loaded: LoadedModel, request: Request) -> list[list[int]]:
    """Token ids of each prompt. Takes a while for a long text: call it in a thread."""
    if isinstance(request, ChatRequest):
        return [_apply_template(loaded, request)]
    assert isinstance(request, CompletionRequest)
    prompts = []
    for prompt in request.prompts():
        if isinstance(prompt, list):
            if any(not 0 <= token < loaded.vocab_size for token in prompt):
                raise ApiError(400, f"a token id is outside 0..{loaded.vocab_size - 1}", param="prompt")
            prompts.append(prompt)
            continue
        ids = loaded.tokenizer(prompt).input_ids
        if not ids and loaded.start_id is None:
            raise ApiError(400, "prompt is empty, and this model has no token that starts a document", param="prompt")
        prompts.append(ids or [loaded.start_id])
    return prompts


def echoed(loaded: LoadedModel, request: Request, prompts: list[list[int]]) -> list[str]:
    """The text that each prompt is shown as: what the client wrote, or what its ids stand for. Empty without `echo`."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return [""] * len(prompts)
    return [
        asked if isinstance(asked, str) else loaded.backend.decode(ids, skip_special_tokens=True)
        for asked, ids in zip(request.prompts(), prompts, strict=True)
    ]


def _apply_template(loaded: LoadedModel, request: ChatRequest) -> list[int]:
    """In the very tokens of training. Control tokens that a client typed are text."""
    if loaded.template is None:
        message = "this model has no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    tools = [tool.model_dump() for tool in request.tools or ()] if request.tool_choice != "none" else []
    try:
        return loaded.template.prompt_ids([message.canonical() for message in request.messages], tools or None)
    except ChatRefused as refusal:
        param = "tools" if "tool" in refusal.reason and tools else "messages"
        message = f"the model's chat template refuses these messages ({refusal.reason})"
        raise ApiError(400, message, param=param) from refusal
    except RecursionError as error:
        raise ApiError(400, "messages or tools are nested too deep", param="messages") from error


def make_sampling(loaded: LoadedModel, request: Request, prompt_tokens: int, cap: int | None, param: str) -> Sampling:
    """ApiError 400 when the answer does not fit behind `prompt_tokens`, or more is asked than `cap`."""
    context, asked = loaded.context_length, request.length()
    room = context - prompt_tokens
    if (room < 1 and asked != 0) or room < 0 or (asked is not None and asked > room):
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{asked or 0} tokens for the answer and {prompt_tokens} in the {param}. Please reduce one of them.",
            param=param,
            code="context_length_exceeded",
        )
    if cap is not None and asked is not None and asked > cap:
        raise ApiError(400, f"max_tokens is {asked}, this server allows at most {cap}", param="max_tokens")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    special = {
        token.content: number for number, token in loaded.tokenizer.added_tokens_decoder.items() if token.special
    }
    told = request.told()

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        max_tokens=min(room, cap or room) if asked is None else asked,
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=given(request.min_p, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        logit_bias=_bias(loaded, request),
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        seed=request.seed,
        stop=tuple(stop),
        stop_ids=frozenset(special[text] for text in stop if text in special),
        logprobs=told,
        echo_logprobs=told is not None and isinstance(request, CompletionRequest) and bool(request.echo),
    )


def _bias(loaded: LoadedModel, request: Request) -> dict[int, float]:
    bias = {int(name): value for name, value in (request.logit_bias or {}).items()}
    if any(token >= loaded.vocab_size for token in bias):
        raise ApiError(400, f"logit_bias: a token id is outside 0..{loaded.vocab_size - 1}", param="logit_bias")
    return bias
