"""Pages of other sites, and foreign names that resolve to this machine, get nothing from a server without a key."""

from __future__ import annotations

import itertools

import httpx
import pytest

from support.servers.running_server import Server

SMALL = {"prompt": "a", "max_tokens": 1}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/sleep", "/wake_up",
          "/reset_prefix_cache", "/ping")


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 403, answer.text
    return str(answer.json()["error"]["code"])


def test_a_foreign_page_can_do_nothing(edge_server: Server) -> None:
    with edge_server.http() as http:
        kinds = ("application/json", "text/plain", "")
        for route, kind, origin in itertools.product(ROUTES, kinds, ("http://evil.example", "null", "file://")):
            headers = {"Origin": origin, "Content-Type": kind} if kind else {"Origin": origin}
            assert refusal(http.post(route, content=b"{}", headers=headers)) == "foreign_origin"
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/v1/completions", json=SMALL, headers={"Origin": edge_server.url}).status_code == 200
        assert http.post("/v1/completions", json=SMALL, headers={"Origin": "http://page.example"}).status_code == 200
        counted = edge_server.metrics()['spillover:requests_refused_total{reason="foreign_origin"}']
        assert counted >= len(ROUTES) * len(kinds) * 3


@pytest.mark.parametrize(("host", "known"), [
    ("127.0.0.1", True), ("localhost:8000", True), ("[::1]:8000", True), ("app.localhost", True), ("spillover", True),
    ("10.1.2.3:80", True), ("models.example", True), ("MODELS.example.:8000", True), ("evil.example", False),
    ("127.0.0.1.evil.example:8000", False), ("localhost.evil.example", False), ("models.example.evil", False)])
def test_a_name_that_was_bound_to_this_address_is_not_served(edge_server: Server, host: str, known: bool) -> None:
    with edge_server.http() as http:
        for path in ("/", "/live", "/metrics", "/v1/models"):
            answer = http.get(path, headers={"Host": host})
            assert (answer.status_code == 200) if known else (refusal(answer) == "unknown_host")
        answer = http.post("/v1/completions", json=SMALL, headers={"Host": host, "Origin": f"http://{host}"})
        assert (answer.status_code == 200) if known else (refusal(answer) == "unknown_host")
        assert http.get("/health", headers={"Host": host}).status_code == 200  # load balancers use any name


def test_a_body_must_say_that_it_is_json(edge_server: Server) -> None:
    with edge_server.http() as http:
        for kind in (None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            headers = {} if kind is None else {"Content-Type": kind}
            answer = http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
            assert answer.status_code == 415
            assert "curl -H 'Content-Type: application/json'" in answer.json()["error"]["message"]
        typed = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}',
                         headers=typed).status_code == 200


def test_admin_routes_are_off_unless_asked_for(null_server: Server, edge_server: Server) -> None:
    with null_server.http() as http:
        for route in ("/sleep", "/wake_up", "/reset_prefix_cache"):
            answer = http.post(route)
            assert refusal(answer) == "admin_routes_off"
            assert "--enable-admin-routes" in answer.json()["error"]["message"]
    with edge_server.http() as http:
        assert http.post("/sleep").status_code == 401
        assert http.post("/sleep", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert http.post("/reset_prefix_cache", headers={"Authorization": "Bearer admin"}).status_code == 200
        assert http.post("/v1/completions", json=SMALL).status_code == 200  # other routes need no key
