"""docs/api.md is made from the OpenAPI snapshot that the tests of the service keep, and from the app's other routes.

To write it anew: make docs, or python tests/docs/test_api_page.py > docs/api.md
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdatune_api.app import create_app
from kdatune_tuner.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
DOCUMENT: dict[str, Any] = json.loads((ROOT / "tests" / "api" / "openapi.json").read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
HEAD = """# HTTP interface

Version 1. The same, machine-readable: `/openapi.json`; to read in a browser: `/docs`.

- **Who may.** Reads are open unless `KDATUNE_OPEN_READS=false`. A write needs `Authorization: Bearer TOKEN` with the scope
  that is named; `kdatune token create` makes one. A report of misses needs none where it comes in on a loopback address.
- **Errors** are `application/problem+json` (RFC 9457): `type`, `title`, `status`, `detail`, and `errors` where fields are
  wrong. What is not in the tables below, a parameter or a field, is refused with 422 and named.
- **Lists** come in pages: `next_cursor` of one is `cursor` of the next, null at the end.
- **Caching.** What launchers poll has a strong `ETag`; sent back as `If-None-Match` it is answered with 304 and no body.
- **Units** are in the names: `_us`, `_pct`, `_bytes`, `_seconds`. What could not be measured is null, with
  the reason beside it.
- **Within v1** fields and routes are added, never changed or taken away.
"""
HIDDEN = {
    "/metrics": "counters and times for Prometheus",
    "/openapi.json": "this interface as OpenAPI 3.1",
    "/docs": "this interface as one page, which loads nothing from elsewhere",
}
PAGES = """
## Pages

The dashboard, as HTML. Filters are in the address, so a view can be linked; what it shows can be had as JSON above.

| route | shows |
|---|---|
"""
SHOWN = {
    "/": "what is served and how much faster than the default, by GPU model and shape",
    "/configs": "every champion",
    "/configs/{gpu}/{shape}": "the config of a shape beside the default and the one before, with its evidence",
    "/profiles": "every profile",
    "/profiles/{gpu}/{shape}": "counters of champion and default, and the why",
    "/studies": "every search",
    "/studies/{gpu}/{shape}": "the trials of a shape: history, importance, failures",
    "/waves": "how well launches fill the card",
    "/trends": "times over the nights",
    "/trends/{gpu}/{shape}": "times of a shape over the nights",
    "/trends/regressions": "what got slower, and what is acknowledged",
    "/trends/regressions/{id}": "one regression, with the times before and after",
    "/nights": "every night",
    "/nights/{id}": "the report of a night",
    "/compare": "two cards, dates or configs side by side",
    "/charts/{name}": "a chart of a page",
    "/charts/waves": "a chart of a page",
    "/charts/trend": "a chart of a page",
    "/static/{name}": "style, script and icon of the pages",
}


def routes(found: Any = None) -> Iterator[Any]:
    """Every route of the app, those of included routers too."""
    for route in create_app(Settings(_env_file=None)).routes if found is None else found:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from routes(router.routes)
        else:
            yield route


def path_of(route: Any) -> str:
    """The route's path as people write it: without the converters of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)


def page() -> str:
    """The page as it should be."""
    parts = [HEAD, "\n## Calls\n"]
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            parts.append(_call(method.upper(), path, operation))
    parts.append("\n## Not in the OpenAPI document\n\n| route | answers |\n|---|---|\n")
    parts.extend(f"| GET {path} | {what} |\n" for path, what in HIDDEN.items())
    parts.append(PAGES)
    parts.extend(
        f"| {method} {path} | {SHOWN.get(path, '')} |\n" for method, path in sorted(_pages(), key=lambda page: page[1])
    )
    parts.append("\n## Documents\n\nFields are always there unless they are marked optional.\n")
    parts.extend(_document(name, schema) for name, schema in SCHEMAS.items() if _is_listed(name))
    return "".join(parts)


def _pages() -> set[tuple[str, str]]:
    listed = {*DOCUMENT["paths"], *HIDDEN}
    return {
        (method, path_of(route))
        for route in routes()
        if path_of(route) not in listed
        for method in sorted((getattr(route, "methods", None) or {"GET"}) - {"HEAD"})
    }


def _call(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"\n### {method} {path}\n\n{operation['summary']}.\n"]
    if operation.get("description"):
        lines.append(f"\n{operation['description']}\n")
    needed = [scope for one in operation.get("security", ()) for scope in one.get("bearer", ())]
    if needed:
        lines.append(f"\nScope: `{needed[0]}`.\n")
    parameters = operation.get("parameters", ())
    if parameters:
        lines.append("\n| parameter | in | type | default | what it is |\n|---|---|---|---|---|\n")
    for one in parameters:
        schema = one["schema"]
        default = "required" if one.get("required") else _default(schema)
        told = one.get("description") or schema.get("description") or ""
        lines.append(f"| {one['name']} | {one['in']} | {_type(schema)} | {default} | {_cell(told)} |\n")
    body = operation.get("requestBody")
    if body:
        lines.append(f"\nBody: {_type(body['content']['application/json']['schema'])}\n")
    lines.append(f"\nAnswer: {_answer(operation['responses']['200'])}")
    others = [status for status in operation["responses"] if status != "200"]
    lines.append(f" Else: {', '.join(sorted(others))}.\n")
    return "".join(lines)


def _answer(response: dict[str, Any]) -> str:
    ((kind, content),) = response["content"].items()
    return f"{_type(content['schema'])}." if content.get("schema") else f"{response['description']} ({kind})."


def _document(name: str, schema: dict[str, Any]) -> str:
    lines = [f"\n### {_title(name)}\n"]
    if schema.get("description"):
        lines.append(f"\n{' '.join(schema['description'].split())}\n")
    if "enum" in schema:
        lines.append(f"\nOne of {', '.join(f'`{value}`' for value in schema['enum'])}.\n")
        return "".join(lines)
    lines.append("\n| field | type | what it is |\n|---|---|---|\n")
    required = set(schema.get("required", ()))
    for field, of in schema.get("properties", {}).items():
        optional = "" if field in required else " (optional)"
        lines.append(f"| {field}{optional} | {_type(of)} | {_cell(of.get('description') or '')} |\n")
    return "".join(lines)


def _is_listed(name: str) -> bool:
    return name != "JsonValue" and not (name.endswith("-Input") and name.replace("-Input", "-Output") in SCHEMAS)


def _title(name: str) -> str:
    return re.sub(r"-(Input|Output)$", "", name).strip("_")


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return "JSON" if name == "JsonValue" else f"[{_title(name)}](#{_title(name).lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return {"object": "object", None: "JSON"}.get(schema.get("type"), schema.get("type", "JSON"))


def _default(schema: dict[str, Any]) -> str:
    return "" if schema.get("default") is None else f"`{json.dumps(schema['default'])}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def test_the_page_is_of_this_code() -> None:
    assert PAGE.read_text() == page(), "make docs writes it anew"


def test_every_route_of_the_app_is_on_the_page() -> None:
    written = PAGE.read_text()
    for route in routes():
        for method in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}:
            assert re.search(rf"(### |\| ){method} {re.escape(path_of(route))}( \| \w|\n)", written), route.path


def test_every_parameter_says_what_it_is() -> None:
    silent = [
        f"{path} {one['name']}"
        for path, operations in DOCUMENT["paths"].items()
        for operation in operations.values()
        for one in operation.get("parameters", ())
        if not (one.get("description") or "enum" in one["schema"] or "const" in one["schema"])
    ]
    assert silent == []


if __name__ == "__main__":
    sys.stdout.write(page())
