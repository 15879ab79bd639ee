"""A deployment of a model for Ray Serve: `cd deploy/ray && serve run serve_app:app flags="MODEL --max-replicas 4"`."""

import shlex

from ray import serve
from starlette.requests import Request
from starlette.responses import RedirectResponse

from spillover.cluster.ray_serve import RouterProcess


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, health_check_period_s=5)
class Spillover:
    async def __init__(self, flags: str, port: int) -> None:
        self.router = await RouterProcess.start(*shlex.split(flags), port=port)

    async def check_health(self) -> None:
        self.router.check()

    async def __call__(self, request: Request) -> RedirectResponse:
        return RedirectResponse(self.router.url + request.url.path, status_code=307)


def app(given: dict[str, str]) -> serve.Application:
    return Spillover.bind(given.get("flags", ""), int(given.get("port", 8100)))
