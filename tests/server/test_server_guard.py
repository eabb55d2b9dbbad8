"""Who may come in: keys, hosts, origins, and every route that the application has."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from scripted_engine import ScriptedEngine, Wait, always, delta
from server_harness import CARD, LIMITS, running

from penstock.contract.errors import ConfigError
from penstock.contract.request import EngineRequest, TextPrompt
from penstock.contract.server_config import ServerConfig
from penstock.server import create_app, open_access
from penstock.server.http.access import Access, is_loopback, read_keys

KEY, OTHER, ADMIN = "sk-user-0123456789", "sk-other-0123456789", "sk-admin-0123456789"
ENVIRON = {"PENSTOCK_API_KEY": KEY, "PENSTOCK_ADMIN_KEY": ADMIN}


@dataclass
class Guarded:
    url: str
    engine: ScriptedEngine

    def get(self, path: str, key: str = "", **headers: str) -> httpx.Response:
        return self.send("GET", path, key, **headers)

    def send(self, method: str, path: str, key: str = "", json=None, **headers: str) -> httpx.Response:
        extra = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, self.url + path, headers=extra | headers, json=json, timeout=10)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# keys of the test\n\n{OTHER}\n")
    path.chmod(0o600)
    config = ServerConfig(api_key_file=str(path), cors_origins="https://page.example")
    engine = ScriptedEngine()
    with running(engine, access=open_access(config, ENVIRON)) as url:
        yield Guarded(url, engine)


def routes() -> list[tuple[str, str]]:
    document = create_app(ScriptedEngine(), CARD, LIMITS).openapi()
    listed = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    return [*listed, ("GET", "/openapi.json"), ("GET", "/no/such/route"), ("POST", "/")]


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_route_needs_a_key_but_liveness(guarded, method, path):
    path = path.replace("{model_id}", "x").replace("{response_id}", "x")
    for key in ("", "wrong", KEY[:-1], KEY + "x", KEY.upper()):
        answer = guarded.send(method, path, key)
        if path == "/health/live":
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401
        error = answer.json()["error"]
        kind = error["type"]
        assert kind == "authentication_error"
        assert KEY not in answer.text
    assert guarded.send(method, path, KEY).status_code not in (401, 500)


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css"])
def test_the_files_of_the_page_need_no_key(guarded, path):
    answer = guarded.get(path)
    assert answer.status_code == 200
    assert "content-security-policy" in answer.headers
    assert guarded.send("POST", path).status_code == 401


@pytest.mark.parametrize("path", ["/page/../metrics", "/page/..%2fmetrics", "/page/%2e%2e/engine/sampling"])
def test_no_path_leads_out_of_the_pages_folder(guarded, path):
    with socket.create_connection(("127.0.0.1", httpx.URL(guarded.url).port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert int(answer.split()[1]) == 404


def test_the_engines_events_need_a_key(guarded):
    assert guarded.get("/engine/events").status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("GET", guarded.url + "/engine/events", headers=headers, timeout=10) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith("data: ")


def test_refusals_are_counted(guarded):
    assert guarded.get("/v1/models", "wrong").status_code == 401
    counted = 'http_requests_total{handler="none",method="GET",status="4xx"}'
    assert counted in guarded.get("/metrics", KEY).text


@pytest.mark.parametrize("key", [KEY, OTHER, ADMIN])
def test_any_of_the_keys_opens(guarded, key):
    assert guarded.get("/v1/models", key).status_code == 200
    assert httpx.get(guarded.url + "/v1/models", headers={"x-api-key": key}).status_code == 200


SPELLINGS = [
    "/health/live/",
    "//health/live",
    "/health/live?x",
    "/health/live/../../v1/models",
    "/health%2flive",
    "/health/liv%65",
    "/HEALTH/live",
    "/v1/models?/health/live",
    "/v1/models;/health/live",
    "http://evil/health/live",
]


@pytest.mark.parametrize("target", SPELLINGS)
@pytest.mark.parametrize("host", ["localhost", "localhost/health/live?x=", "localhost:80@evil"])
def test_no_other_spelling_of_the_open_path_opens(guarded, target, host):
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(guarded.url).port)) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    status = int(answer.split()[1])
    opened = target == "/health/live?x" and host == "localhost"
    assert status == 200 if opened else status in (400, 401, 403)


def test_an_admins_route_needs_an_admins_key(guarded):
    refused = guarded.send("POST", "/reset_prefix_cache", KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    assert guarded.send("POST", "/reset_prefix_cache/", KEY).status_code == 404
    assert guarded.send("POST", "/reset%5Fprefix_cache", KEY).status_code == 403
    assert guarded.engine.resets == 0
    assert guarded.send("POST", "/reset_prefix_cache", ADMIN).status_code == 200


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiles_are_an_admins(guarded, path):
    guarded.engine.profiling = path == "/stop_profile"
    before = guarded.engine.profiling
    refused = guarded.send("POST", path, KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    assert guarded.engine.profiling == before
    assert guarded.send("POST", path, ADMIN).status_code == 200
    assert guarded.engine.profiling != before


def test_keys_never_share_cached_work_and_the_engine_learns_neither_key_nor_salt(guarded):
    salts = {}
    for key, salt in ((KEY, ""), (OTHER, ""), (KEY, "mine"), (OTHER, "mine"), (KEY, "mine")):
        body = {"prompt": "a", "user": "someone"} | ({"cache_salt": salt} if salt else {})
        assert guarded.send("POST", "/v1/completions", key, json=body).status_code == 200
        request = guarded.engine.requests[-1]
        assert salts.setdefault((key, salt), request.cache_salt) == request.cache_salt
        assert key not in repr(request)
        assert "mine" not in repr(request)
    assert len(set(salts.values())) == 4
    assert len({request.tenant for request in guarded.engine.requests}) == 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"user": "al"}),
        ("/v1/chat/completions", {"safety_identifier": "al"}),
        ("/v1/responses", {"safety_identifier": "al"}),
        ("/v1/embeddings", {"user": "al"}),
        ("/v1/messages", {"metadata": {"user_id": "al"}}),
    ],
)
def test_a_key_is_the_tenant_whatever_user_its_caller_names(guarded, path, fields):
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    bodies = {"/v1/responses": {"input": "Hi"}, "/v1/embeddings": {"input": "Hi"}}
    bodies["/v1/messages"] = messages | {"model": "acme/tiny-1", "max_tokens": 4}
    for key, user in ((KEY, fields), (KEY, {}), (ADMIN, fields)):
        answer = guarded.send("POST", path, key, json=bodies.get(path, messages) | user)
        assert answer.status_code == 200
        assert "x-ignored-params" not in answer.headers
    of_user, of_nobody, of_another = [request.tenant for request in guarded.engine.requests[-3:]]
    assert of_user == of_nobody != of_another
    assert of_user != "al"


def test_a_key_aborts_its_own_answers_only_and_an_admin_any(guarded):
    guarded.engine.reset()
    guarded.engine.script = always(delta("x"), Wait())
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream(
        "POST", guarded.url + "/v1/completions", json={"prompt": "a", "stream": True}, headers=headers
    ) as response:
        lines = response.iter_lines()
        next(lines)
        body = {"request_ids": [guarded.engine.requests[-1].id.rpartition("-")[0]]}
        for key, count in ((OTHER, 0), (KEY, 1), (ADMIN, 1)):
            assert len(guarded.send("POST", "/abort_requests", key, json=body).json()["aborted"]) == count
    guarded.engine.wait_until(lambda: not guarded.engine.live)
    guarded.engine.reset()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "[::2]", "127.0.0.2"])
def test_a_name_that_is_not_this_machines_is_refused(served, host):
    answer = served.http.get("/v1/models", headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_this_machines_names_are_served(served, host):
    assert served.http.get("/v1/models", headers={"host": host}).status_code == 200


def test_pages_of_other_origins_may_cause_nothing_by_default(served):
    refused = served.http.post("/reset_prefix_cache", headers={"origin": "https://evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert served.engine.resets == 0
    assert served.http.post("/reset_prefix_cache", headers={"origin": "null"}).status_code == 403
    own = served.http.post("/reset_prefix_cache", headers={"origin": served.url})
    assert own.status_code == 200
    preflight = served.http.options(
        "/v1/models", headers={"origin": "https://evil.example", "access-control-request-method": "GET"}
    )
    assert preflight.status_code in (403, 405)
    for answer in (own, preflight, served.http.get("/v1/models", headers={"origin": "https://evil.example"})):
        assert "access-control-allow-origin" not in answer.headers


def test_an_allowed_origin_is_told_so_on_every_answer(guarded):
    page = {"origin": "https://page.example"}
    preflight = guarded.send("OPTIONS", "/v1/chat/completions", **page, **{"access-control-request-method": "POST"})
    assert preflight.status_code == 204
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for answer in (preflight, guarded.get("/v1/models", KEY, **page), guarded.get("/v1/models", **page)):
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-credentials" not in answer.headers
        assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-origin" not in guarded.get("/v1/models", KEY, origin="https://evil.example").headers


def test_too_many_and_too_large_headers_are_refused(served):
    many = served.http.get("/v1/models", headers={f"x-{index}": "1" for index in range(70)})
    assert (many.status_code, many.json()["error"]["code"]) == (431, "too_many_headers")
    large = served.http.get("/v1/models", headers={"x-large": "a" * 20_000})
    assert large.status_code in (400, 431)
    assert large.json()["error"]["code"] in ("headers_too_large", "invalid_http")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "some.name"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ConfigError, match=r"host: .* needs an API key"):
        open_access(ServerConfig(host=host), {})
    assert open_access(ServerConfig(host=host), ENVIRON).hosts == frozenset()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.2.1"])
def test_this_machines_own_addresses_need_none(host):
    access = open_access(ServerConfig(host=host, allowed_hosts="My.Name, other"), {})
    assert not access.keys
    assert {"localhost", "127.0.0.1", "::1", host, "my.name", "other"} == access.hosts
    assert is_loopback(host)


def test_a_star_turns_the_host_check_off():
    assert open_access(ServerConfig(allowed_hosts="*"), {}).hosts == frozenset()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("short\n", "at least 16"),
        ("with spaces in it all\n", "line 1: must be"),
        ("schlüssel-0123456789\n", "ASCII"),
        ("a-key-of-0123456789 share=0\n", "line 1: share=0 must be a number in 0.01..100"),
        ("a-key-of-0123456789 share=much\n", "share=much must be a number"),
        ("share=2\n", "line 1: must be `KEY`"),
        (
            "# two\na-key-of-0123456789 concurrent=0\n",
            "keys, line 2: concurrent=0 must be a whole number in 1..1000000",
        ),
        ("a-key-of-0123456789 concurrent=many\n", "line 1: concurrent=many must be a whole number"),
        ("a-key-of-0123456789 concurrent=1.5\n", "concurrent=1.5 must be"),
        ("a-key-of-0123456789 concurrent=\n", "concurrent= must be"),
        ("a-key-of-0123456789 concurrent=-1\n", "concurrent=-1 must be"),
        ("a-key-of-0123456789 concurrent=1000001\n", "concurrent=1000001 must be"),
        (f"a-key-of-0123456789 concurrent={'9' * 5000}\n", "must be a whole number"),
        ("a-key-of-0123456789 concurrent=\u0663\n", "must be a whole number"),
        ("a-key-of-0123456789 concurrent=2 concurrent=3\n", "line 1: concurrent is given twice"),
        (
            "a-key-of-0123456789 concurent=2\n",
            "must be `KEY`, `admin KEY` or `gateway KEY`, and may end with `share=NUMBER` and `con",
        ),
        ("concurrent=2 a-key-of-0123456789\n", "line 1: must be `KEY`"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path, text, why):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=why):
        read_keys(str(path), {})


def test_a_key_file_says_whose_share_is_larger(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY} share=2.5\nadmin {ADMIN}  share=0.5\nanother-key-of-somebody\n")
    path.chmod(0o600)
    keys = read_keys(str(path), {})
    found = [keys.find(key) for key in (KEY, ADMIN, "another-key-of-somebody")]
    assert [(caller.admin, caller.share) for caller in found] == [(False, 2.5), (True, 0.5), (False, 1.0)]
    assert found[0].bind(EngineRequest("r", TextPrompt("x"))).share == 2.5


def test_a_key_file_says_how_many_requests_a_key_may_have_at_once(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY} concurrent=8 share=2\nadmin {ADMIN} share=3 concurrent=1\nanother-key-of-somebody==\n")
    path.chmod(0o600)
    keys = read_keys(str(path), {})
    found = [keys.find(key) for key in (KEY, ADMIN, "another-key-of-somebody==")]
    assert [(caller.admin, caller.concurrent, caller.share) for caller in found] == [
        (False, 8, 2.0),
        (True, 1, 3.0),
        (False, 0, 1.0),
    ]


def test_a_gateways_salts_are_its_own_and_nobody_elses_are(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"gateway {KEY} share=2\nadmin {ADMIN}\nanother-key-of-somebody\n")
    path.chmod(0o600)
    keys = read_keys(str(path), {"PENSTOCK_GATEWAY_KEY": "the-key-of-a-router"})
    callers = [keys.find(key) for key in (KEY, "the-key-of-a-router", ADMIN, "another-key-of-somebody")]
    assert [(caller.gateway, caller.admin) for caller in callers] == [(True, False)] * 2 + [
        (False, True),
        (False, False),
    ]
    for salt in ("", "a tenant's"):
        bound = [caller.bind(EngineRequest("r", TextPrompt("x"), cache_salt=salt)) for caller in callers]
        assert [each.cache_salt for each in bound[:2]] == [salt, salt]
        assert len({each.cache_salt for each in bound}) == 3, "keys that are no gateway's share with nobody"
        assert len({each.tenant for each in bound}) == 4
    assert callers[0].share == 2


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_a_key_file_that_everybody_may_read_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(str(path), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"), {})


def test_keys_are_told_apart_and_never_kept():
    keys = read_keys("", ENVIRON)
    assert keys.find(KEY) is not None
    assert not keys.find(KEY).admin
    assert keys.find(ADMIN).admin
    assert keys.find("") is keys.find("\ud800") is None
    assert KEY not in repr(keys)
    assert keys.find(KEY).name != keys.find(ADMIN).name
    assert Access().keys.find(KEY) is None
