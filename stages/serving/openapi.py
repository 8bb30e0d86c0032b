"""/openapi.json: the API as a document for machines. Apart from the app: the requests are described by the very models that check
them, answers by their outer shape."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from stages.serving.options import Identity
from stages.serving.protocol import ChatRequest, CompletionRequest

ERRORS = {
    "400": "a field, named by param, is wrong or not supported, or the context is too short",
    "401": "the key is missing or wrong",
    "404": "there is no such model or path",
    "405": "another method is wanted",
    "408": "the body or the answer took too long",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "429": "too many requests wait: Retry-After says when to come again",
    "503": "the model is loading, ending or dead: Retry-After says when to come again",
}


def document(identity: Identity) -> dict[str, Any]:
    """OpenAPI 3.1. The model's name is the only one that requests may give."""
    kinds: dict[str, type[BaseModel]] = {"completions": CompletionRequest, "chat/completions": ChatRequest}
    asked: list[tuple[type[BaseModel], JsonSchemaMode]] = [(kind, "validation") for kind in kinds.values()]
    found, schemas = models_json_schema(asked, ref_template="#/components/schemas/{model}")
    definitions = schemas["$defs"]
    for kind in kinds.values():
        definitions[kind.__name__]["properties"]["model"]["enum"] = [identity.model]
    posts = {
        f"/v1/{name}": {
            "post": {
                "operationId": name.replace("/", "_"),
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": found[kind, "validation"]}},
                },
                "responses": _responses(
                    {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
                    ("400", "401", "404", "405", "408", "413", "415", "429", "503"),
                ),
            }
        }
        for name, kind in kinds.items()
    }
    gets = {
        path: {
            "get": {
                "operationId": path.strip("/").replace("/", "_").replace(".", "_"),
                "responses": _responses({kind: {}}, ("401", "405", "503")),
            }
        }
        for path, kind in {
            "/health": "application/json",
            "/ready": "application/json",
            "/metrics": "text/plain",
            "/v1/models": "application/json",
        }.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": identity.model, "version": str(identity.version)},
        "paths": {**posts, **gets},
        "components": {
            "schemas": {**definitions, "Error": _error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses(content: dict[str, Any], errors: tuple[str, ...]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"200": {"description": "the answer", "content": content}} | {
        status: {"description": ERRORS[status], "content": error} for status in errors
    }


def _error() -> dict[str, Any]:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    fields = {"message": text, "type": text, "param": maybe, "code": maybe}
    inner = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
