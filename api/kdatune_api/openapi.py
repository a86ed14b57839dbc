"""The OpenAPI document, in which every error is a problem document, and the page that shows it without a script."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from jinja2 import Environment
from jinja2 import FileSystemLoader

from kdatune_api.problems import MEDIA_TYPE
from kdatune_api.problems import PROBLEMS
from kdatune_api.problems import Problem
from kdatune_api.problems import status_phrase
from kdatune_kernels.spec import Json

Responses = dict[int | str, dict[str, Any]]

TITLE = "kdatune"
DESCRIPTION = "Tuned launch configs of GPU kernels: what to launch on a card for a problem shape, and why."

_FIRST_ERROR = 400
SECURITY_SCHEME = "bearer"
_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "made by `kdatune token create`; which scope an operation needs is in its `security`",
}
_HEADER = {"schema": {"type": "string"}}
CACHED: Responses = {
    200: {
        "headers": {
            "ETag": {"description": "strong validator; give it back as If-None-Match", **_HEADER},
            "Cache-Control": _HEADER,
            "Vary": _HEADER,
        }
    },
    304: {"description": "Not modified since the ETag given in If-None-Match; no body"},
}


def errors(*statuses: int) -> Responses:
    """The problem answers that an operation declares; those of the middleware (414, 431) and 500 are in all of them."""
    everywhere = {*statuses, 414, 431, 500}
    return {status: {"model": Problem, "description": status_phrase(status)} for status in sorted(everywhere)}


def openapi_of(app: FastAPI) -> Json:
    """The OpenAPI document of the app. FastAPI writes every answer as application/json; errors are problem+json."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for _, _, operation in _operations(document):
            for status, response in operation["responses"].items():
                if int(status) >= _FIRST_ERROR and "content" in response:
                    response["content"] = {MEDIA_TYPE: response["content"]["application/json"]}
        document["components"]["securitySchemes"] = {SECURITY_SCHEME: _BEARER}
        app.openapi_schema = document
    return app.openapi_schema


@dataclass(frozen=True)
class _Operation:
    method: str
    path: str
    summary: str
    parameters: list[Json]
    body: str | None
    answers: list[tuple[str, str, str]]


def docs_page(document: Json) -> str:
    """The OpenAPI document as one HTML page: no script, nothing fetched from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    operations = [_described(method, path, operation) for method, path, operation in _operations(document)]
    return environment.get_template("docs.html").render(
        info=document["info"], operations=operations, problems=PROBLEMS, type_of=_type_of
    )


def _operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _described(method: str, path: str, operation: Json) -> _Operation:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    answers = [
        (
            status,
            response["description"],
            next((_type_of(c.get("schema", {})) for c in response.get("content", {}).values()), ""),
        )
        for status, response in operation["responses"].items()
    ]
    parameters = sorted(operation.get("parameters", []), key=lambda parameter: not parameter["required"])
    return _Operation(method, path, operation["summary"], parameters, _type_of(body) if body else None, answers)


def _type_of(schema: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " or ".join(_type_of(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def main() -> None:
    """Print the OpenAPI document, to accept a change of the contract."""
    from kdatune_api.app import create_app

    sys.stdout.write(json.dumps(create_app().openapi(), indent=2) + "\n")


if __name__ == "__main__":
    main()
