"""`install_pages` is all that the app needs of the pages."""

from fastapi import FastAPI

from kdatune_api.pages import assets
from kdatune_api.pages import charts
from kdatune_api.pages import compare
from kdatune_api.pages import config
from kdatune_api.pages import configs
from kdatune_api.pages import nights
from kdatune_api.pages import overview
from kdatune_api.pages import profiles
from kdatune_api.pages import regressions
from kdatune_api.pages import studies
from kdatune_api.pages import trends
from kdatune_api.pages import waves
from kdatune_api.pages.errors import answer_browsers
from kdatune_api.pages.state import PagesState
from kdatune_api.pages.web import compile_templates


def install_pages(app: FastAPI) -> None:
    """Add the pages, what they load, and error pages for browsers. Called once, after everything else is in place."""
    app.state.pages = PagesState()
    compile_templates()
    modules = (
        overview,
        configs,
        config,
        profiles,
        studies,
        waves,
        nights,
        regressions,
        trends,
        compare,
        charts,
        assets,
    )
    for module in modules:
        app.include_router(module.router, include_in_schema=False)
    answer_browsers(app)
