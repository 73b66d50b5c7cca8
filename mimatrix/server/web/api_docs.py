"""The API documentation as one page, made from the OpenAPI description without scripts or external resources."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

Schema = Mapping[str, Any]
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{margin-top:2rem}h3{font-size:1rem;margin:1.5rem 0 0}code{font-family:monospace}"
    "p,ul{margin:.25rem 0}li{margin-left:-1rem}"
)
# The browser loads nothing from elsewhere, whatever the page contains.
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def install(app: FastAPI) -> None:
    """Serve the page at /docs."""

    def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()), headers=_HEADERS)

    app.add_api_route("/docs", docs, include_in_schema=False)


def page(described: Schema) -> str:
    """Return the page with all operations, their parameters and descriptions."""
    about = described["info"]
    title = escape(about["title"])
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>{title} {escape(about['version'])}</h1><p>{escape(about.get('summary', ''))}</p>",
        "<p>Requests carry a token: <code>Authorization: Bearer TOKEN</code>. "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    section = ""
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation.get("tags", ["other"])[:1]
            if tag != section:
                section = tag
                parts.append(f"<h2>{escape(tag)}</h2>")
            parts.append(f"<h3><code>{method.upper()} {escape(path)}</code></h3>")
            parts.append(f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>")
            taken = "".join(f"<li>{each}</li>" for each in _taken(operation, described))
            parts.append(f"<ul>{taken}</ul>" if taken else "")
    return "\n".join(parts) + "</html>\n"


def _taken(operation: Schema, described: Schema) -> Iterator[str]:
    for each in operation.get("parameters", ()):
        yield _line(each["name"], each["in"], _kind(each["schema"], described), each.get("required", False))
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(content["schema"], described)
        if "properties" not in schema:
            yield f"the body: {escape(kind)}"
        for name, inner in schema.get("properties", {}).items():
            yield _line(name, "body", _kind(inner, described), name in schema.get("required", ()))


def _line(name: str, place: str, kind: str, is_required: bool) -> str:
    return f"<code>{escape(name)}</code> ({place}{', required' * is_required}): {escape(kind)}"


def _kind(schema: Schema, described: Schema) -> str:
    """Return a type in words: `integer from 1 to 1000`, `array of string`, `integer or null`."""
    schema = _resolved(schema, described)
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_kind(each, described) for each in schema["anyOf"])
    kind = str(schema.get("type", "any"))
    if kind == "array" and "items" in schema:
        return f"array of {_kind(schema['items'], described)}"
    bounds = [f"{word} {schema[key]:.16g}" for word, key in (("from", "minimum"), ("to", "maximum")) if key in schema]
    return " ".join([kind, *bounds])


def _resolved(schema: Schema, described: Schema) -> Schema:
    while "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema
