"""`GET /`, as a browser and as a program."""

from __future__ import annotations

from cohort.services.gateway.front_page import DOCS_PATH
from tests.services.gateway.conftest import OpenSite


async def test_a_program_is_told_name_version_and_links(open_site: OpenSite) -> None:
    async with open_site() as site:
        status, body = await site.get("/")
        assert (status, body["name"], body["model"]) == (200, "cohort", "tiny")
        for name, link in body["links"].items():
            if name not in ("live_page",):
                async with site.session.get(site.url + link) as response:
                    assert response.status in (200, 503), link  # 503: not ready


async def test_a_browser_here_is_led_to_the_live_page_and_one_elsewhere_to_the_docs(open_site: OpenSite) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with open_site(allowed_hosts=("models.example",)) as site:
        async with site.session.get(site.url + "/", headers=browser, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (302, "http://127.0.0.1:8001/")
        away = {**browser, "Host": "models.example"}
        async with site.session.get(site.url + "/", headers=away, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (302, DOCS_PATH)


async def test_what_the_request_says_never_becomes_part_of_the_address(open_site: OpenSite) -> None:
    async with open_site(api_keys=("k",)) as site:
        headers = {"Accept": "text/html", "Host": "evil.example", "X-Forwarded-Host": "evil.example"}
        async with site.session.get(site.url + "//evil.example", headers=headers, allow_redirects=False) as response:
            assert response.status == 404
        async with site.session.get(site.url + "/", headers=headers, allow_redirects=False) as response:
            assert "evil" not in response.headers["Location"]
