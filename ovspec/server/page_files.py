"""The page: its files, which need no key, and the headers that keep it from running or loading anything else."""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

PAGE_FOLDER = Path(__file__).parent / "page"
START_FILE = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@cache
def read_page_files() -> dict[str, Response]:
    """Return the response with each file of the page, by its path on the server."""
    responses = dict[str, Response]()
    for file in sorted(PAGE_FOLDER.rglob("*")):
        if file.is_file():
            name = file.relative_to(PAGE_FOLDER).as_posix()
            content = file.read_bytes()
            headers = {**HEADERS, "ETag": f'"{sha256(content).hexdigest()[:16]}"'}
            media_type = MEDIA_TYPES.get(file.suffix, "text/plain")
            responses["/" if name == START_FILE else f"/page/{name}"] = Response(content, 200, headers, media_type)
    return responses


def find_page_file(path: str, request_headers: Mapping[str, str]) -> Response | None:
    """Return the response with the file at a path, or None; without its content if the browser has it."""
    response = read_page_files().get(path)
    if response and request_headers.get("if-none-match") == response.headers["ETag"]:
        return Response(status_code=304, headers={**HEADERS, "ETag": response.headers["ETag"]})
    return response


def add_page(app: FastAPI) -> None:
    """Add the page's files to an application."""

    async def send_page_file(http_request: Request) -> Response:
        if page_file := find_page_file(http_request.scope["path"], http_request.headers):
            return page_file
        raise HTTPException(404)

    for path in ("/", "/page/{name:path}"):
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(send_page_file)
