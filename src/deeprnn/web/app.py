"""The server: every address, what it answers, and the order in which things are checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from deeprnn.errors import UserError
from deeprnn.render.browser import PARTS, timbres_module
from deeprnn.runs.reading import printable
from deeprnn.web import details, editing, live, music, refusals, text
from deeprnn.web.guard import Guard
from deeprnn.web.jobs import Seats, Workshop
from deeprnn.web.library import Library, ListedRun
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Fields, Refusal
from deeprnn.web.shelf import Loaded, Shelf

STATIC = Path(__file__).parent / "static"


class Static(StaticFiles):
    """The page's files, asked for anew each time: an upgrade must not meet an old script in a browser's cache."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """With a header that makes the browser ask whether the file changed."""
        answer = super().file_response(*args, **options)
        answer.headers["cache-control"] = "no-cache"
        return answer


class Page:
    """What the addresses share: the runs, the models, the threads and the bounds."""

    def __init__(self, folders: Sequence[Path], limits: Limits, editable: bool) -> None:
        self.limits, self.editable = limits, editable
        self.library = Library(folders, limits)
        self.shelf = Shelf(limits)
        self.workshop = Workshop(limits)
        self.watchers = Seats(limits.watchers, "open curves")

    async def index(self, _request: Request) -> Response:
        """The page itself."""
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def timbres(self, _request: Request) -> Response:
        """The synthesiser's timbres, from the table that makes WAV files."""
        headers = {"cache-control": "no-cache"}
        return Response(timbres_module(), media_type="text/javascript", headers=headers)

    async def runs(self, request: Request) -> Response:
        """All runs, or 304 where nothing changed since the client's copy."""
        entries = await self.workshop.quick(self.library.entries)
        body = {
            "runs": [entry.summary for entry in entries],
            "folders": [printable(f.name) for f in self.library.folders],
            "editable": self.editable,
        }
        return _tagged(request, body)

    async def paper(self, request: Request) -> Response:
        """The paper's results."""
        return _tagged(request, details.paper())

    async def run(self, request: Request) -> Response:
        """One run in full."""
        entry = await self._entry(request)
        return _tagged(request, await self.workshop.quick(details.describe, self.library, entry))

    async def metrics(self, request: Request) -> Response:
        """The learning curve so far."""
        entry = await self._entry(request)
        return _tagged(request, {"rows": await self.workshop.quick(self.library.metrics, entry)})

    async def drawing(self, request: Request) -> Response:
        """The model drawn as in the paper's Figure 2."""
        entry = await self._entry(request)
        svg = await self.workshop.quick(details.drawing, self.library, entry)
        policy = "default-src 'none'; style-src 'unsafe-inline'"  # the picture brings its own style sheet
        headers = {"content-security-policy": policy, "cache-control": "no-cache"}
        return Response(svg, media_type="image/svg+xml", headers=headers)

    async def events(self, request: Request) -> Response:
        """The learning curve as it grows."""
        entry = await self._entry(request)
        seat = self.watchers.take()
        return live.LiveResponse(live.follow(self.library, entry), seat)

    async def primer(self, request: Request) -> Response:
        """A MIDI file as frames of the run's grid."""
        entry = await self._entry(request)
        limits = self.limits
        content = await refusals.read_body(request, limits.upload_bytes, limits.body_seconds, "the MIDI file")
        work = lambda: music.read_primer(self.shelf.music(entry), content, limits)  # noqa: E731
        return JSONResponse(await self.workshop.run(work))

    async def predict(self, request: Request) -> Response:
        """A music model's predictions for a roll."""
        return JSONResponse(await self._ask(request, self.shelf.music, music.predict))

    async def score(self, request: Request) -> Response:
        """How a text surprises a model."""
        return JSONResponse(await self._ask(request, self.shelf.text, text.score))

    async def midi(self, request: Request) -> Response:
        """A roll as a MIDI file."""
        content = await self._ask(request, self.shelf.music, music.midi_file)
        return Response(content, media_type="audio/midi")

    async def wav(self, request: Request) -> Response:
        """A roll as sound."""
        return self.workshop.sound(await self._ask(request, self.shelf.music, music.wav_file))

    async def proceed(self, request: Request) -> Response:
        """A continuation, streamed as it is sampled."""
        entry, fields = await self._entry(request), await self._fields(request)
        loaded = await self.workshop.run(self.shelf.get, entry)
        make = music.continuation if loaded.kind == "music" else text.continuation
        chunks = make(loaded, fields, self.limits)  # refuses before the first byte of the answer
        return self.workshop.stream(chunks)

    async def rename(self, request: Request) -> Response:
        """Another name for a run's folder."""
        return await self._edit(request, editing.rename)

    async def tag(self, request: Request) -> Response:
        """Other tags for a run."""
        return await self._edit(request, editing.tag)

    async def delete(self, request: Request) -> Response:
        """A run and its folder, for good."""
        return await self._edit(request, editing.delete)

    async def _edit(self, request: Request, change: Callable[[Library, ListedRun, Fields], Any]) -> Response:
        if not self.editable:
            raise Refusal(403, "runs cannot be changed from here: start the server with --edit always")
        # No other site's page can send a header of its own choice without asking first, which is not answered.
        if request.headers.get("x-deeprnn") != "page":
            raise Refusal(403, "runs are changed from the page alone: the header x-deeprnn is missing")
        entry, fields = await self._entry(request), await self._fields(request)
        return JSONResponse(await self.workshop.quick(change, self.library, entry, fields))

    async def _entry(self, request: Request) -> ListedRun:
        return await self.workshop.quick(self.library.get, request.path_params["id"])

    async def _fields(self, request: Request) -> Fields:
        limits = self.limits
        return Fields.parse(await refusals.read_body(request, limits.body_bytes, limits.body_seconds))

    async def _ask(
        self,
        request: Request,
        find: Callable[[ListedRun], Loaded],
        work: Callable[[Loaded, Fields, Limits], Any],
    ) -> Any:
        entry, fields = await self._entry(request), await self._fields(request)
        return await self.workshop.run(lambda: work(find(entry), fields, self.limits))


def create_app(
    folders: Iterable[str | Path],
    limits: Limits | None = None,
    names: Iterable[str] = (),
    editable: bool = True,
) -> Starlette:
    """The page over some folders of runs; `editable` lets it rename, tag and delete them."""
    page = Page([Path(folder) for folder in folders], limits or Limits(), editable)
    run = "/api/runs/{id}"
    routes = [
        Route("/", page.index),
        Route("/static/parts/timbres.js", page.timbres),
        Mount("/static/parts", Static(directory=PARTS)),
        Mount("/static", Static(directory=STATIC)),
        Route("/api/runs", page.runs),
        Route("/api/paper", page.paper),
        Route(run, page.run),
        Route(f"{run}/metrics", page.metrics),
        Route(f"{run}/drawing.svg", page.drawing),
        Route(f"{run}/events", page.events),
        Route(f"{run}/primer", page.primer, methods=["POST"]),
        Route(f"{run}/predict", page.predict, methods=["POST"]),
        Route(f"{run}/score", page.score, methods=["POST"]),
        Route(f"{run}/continue", page.proceed, methods=["POST"]),
        Route(f"{run}/midi", page.midi, methods=["POST"]),
        Route(f"{run}/wav", page.wav, methods=["POST"]),
        Route(f"{run}/rename", page.rename, methods=["POST"]),
        Route(f"{run}/tags", page.tag, methods=["POST"]),
        Route(f"{run}/delete", page.delete, methods=["POST"]),
    ]
    handlers = {
        Refusal: refusals.answer_refusal,
        UserError: refusals.answer_user_error,
        HTTPException: refusals.answer_http,
        500: refusals.answer_failure,
    }
    app = Starlette(
        routes=routes,
        exception_handlers=handlers,
        middleware=[Middleware(Guard, names=tuple(names))],
        lifespan=_calm_torch,
    )
    app.state.page = page
    return app


@asynccontextmanager
async def _calm_torch(app: Starlette) -> AsyncIterator[None]:
    """One core a request unless told otherwise: small steps gain nothing from more, and the other clients lose."""
    import torch

    from deeprnn.training.threads import limit

    before = torch.get_num_threads()
    limit(app.state.page.limits.threads)
    yield
    limit(before)


def _tagged(request: Request, value: Any) -> Response:
    """JSON with a tag of its content, so that a client that has it gets 304."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)
