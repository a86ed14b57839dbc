"""What load_service.py compares with: FastAPI routes with the service's parameters that do nothing."""

from typing import Literal

from fastapi import FastAPI
from fastapi import Response


def create_app() -> FastAPI:
    """An app of two bare routes."""
    app = FastAPI(openapi_url=None)

    @app.get("/resolve")
    async def resolve(
        gpu: str,
        N: int,
        H: int,
        T: int,
        kernel: Literal["kda"] = "kda",
        HV: int | None = None,
        K: int = 128,
        V: int = 128,
        dtype: Literal["bf16", "fp16"] = "bf16",
        varlen: bool = False,
        longest_tokens: int | None = None,
        initial_state: bool = True,
        final_state: bool = True,
        state_v_first: bool = False,
        state_dtype: Literal["fp32", "bf16"] = "fp32",
        sm_count: int | None = None,
        compute_capability: str | None = None,
    ) -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/not-modified")
    async def not_modified() -> Response:
        return Response(status_code=304)

    return app
