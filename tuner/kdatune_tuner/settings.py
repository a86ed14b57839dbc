"""Settings of tuner and service, read from the environment (prefix KDATUNE_) or given in code."""

from pydantic import Field
from pydantic_settings import BaseSettings
from pydantic_settings import SettingsConfigDict

_MOST_DAYS = 36_500.0  # a date that lies further back may be none
_MOST_SECONDS = 86_400.0


class Settings(BaseSettings):
    """What can be set. Every field is the environment variable KDATUNE_<NAME>.

    Raises:
        pydantic.ValidationError: a variable cannot be read as its type or is out of range; the message names it.
    """

    model_config = SettingsConfigDict(env_prefix="KDATUNE_", frozen=True, extra="ignore", allow_inf_nan=False)

    database_url: str = Field(
        default="sqlite:///kdatune.db", description="where results are stored: SQLite file or PostgreSQL"
    )
    optuna_storage: str | None = Field(
        default=None,
        description="where Optuna's studies can be looked at: a journal file or a database URL; none: in memory only, "
        "rebuilt from the measurements when a search resumes",
    )
    host: str = Field(default="127.0.0.1", description="address the service listens on")
    port: int = Field(default=8321, ge=0, le=65535, description="port the service listens on; 0 takes a free one")

    # Search
    trials: int = Field(
        default=200, ge=1, description="configs of each stage that a search measures where --trials does not say"
    )
    least_gain_pct: float = Field(
        default=0.02,
        ge=0,
        description="a search ends when five trials in a row were expected to take less than this off the best time; 0: only "
        "its budget ends it, as it does where the trials reach for the whole space",
    )
    trial_timeout_s: float = Field(
        default=120.0, gt=0, le=_MOST_SECONDS, description="a trial that takes longer is killed and typed timeout"
    )
    sms: int | None = Field(
        default=None,
        ge=1,
        description="SMs of the card that tuning, recording, benching and profiling are confined to by a green context, a card "
        "of its own then; none: the whole card",
    )
    finalists: int = Field(default=3, ge=1, description="best candidates that meet the champion in a paired run")

    claim_lease_s: float = Field(
        default=60.0,
        ge=1,
        le=_MOST_SECONDS,
        description="how long a worker of `tune --workers` may be silent before another takes its shape over",
    )

    # Promotion
    min_gain_pct: float = Field(default=0.5, ge=0, description="a gain below this keeps the champion")
    unpaired_min_gain_pct: float = Field(
        default=2.0, ge=0, description="the same for two configs that were not measured in one interleaved run"
    )
    confidence_pct: float = Field(
        default=95.0, gt=0, lt=100, description="level of the interval that a gain must clear"
    )
    paired_rounds: int = Field(default=15, ge=3, description="A B rounds of a paired run")

    # Profiles
    ncu: str | None = Field(
        default=None, description="the Nsight Compute program; none: on the PATH or where it is usual"
    )
    profile_timeout_s: float = Field(
        default=120.0, gt=0, le=_MOST_SECONDS, description="a profile run that takes longer is ended"
    )
    reports_dir: str = Field(default="kdatune-reports", description="folder of the profiler reports that are kept")

    # Nightly
    nightly_budget_s: float = Field(default=7200.0, gt=0, description="wall-clock budget of one nightly run")
    drift_pct: float = Field(
        default=3.0,
        gt=0,
        description="a served config slower than before by more than this, relative to the reference kernel, has got slower",
    )
    machine_slower_pct: float = Field(
        default=3.0, gt=0, description="a machine whose reference kernel is slower by more than this is reported"
    )
    max_age_days: float = Field(
        default=30.0, gt=0, le=_MOST_DAYS, description="a champion measured longer ago than this is looked at again"
    )

    # Regressions
    regression_min_pct: float = Field(
        default=3.0, gt=0, description="a config that became slower by less is no regression, however sure it is"
    )
    regression_confidence_pct: float = Field(
        default=99.5, gt=0, lt=100, description="how sure it must be that a step is not noise"
    )
    regression_min_nights: int = Field(
        default=6, ge=6, description="nights that a config must have been measured on before anything is said of it"
    )
    regression_days: float = Field(
        default=60.0,
        gt=0,
        le=_MOST_DAYS,
        description="days of history that are looked at; older nights say nothing of today",
    )

    # Retention
    keep_days: float = Field(
        default=90.0,
        ge=0,
        le=_MOST_DAYS,
        description="measurements younger than this are all kept by `kdatune db vacuum`",
    )
    keep_per_week: int = Field(
        default=20,
        ge=0,
        description="older measurements that are kept of each kernel, card, shape and week, beside the best, the worst and "
        "all that something refers to",
    )

    # Service
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="largest request body that is read")
    snapshot_max_age_s: int = Field(default=30, ge=0, description="Cache-Control max-age of a snapshot")
    open_reads: bool = Field(
        default=True, description="whether reading needs no token; false: only /healthz, /readyz and /version do not"
    )
    open_demand: bool = Field(
        default=True,
        description="whether launchers on this machine may report misses without a token; set it to false behind a "
        "proxy that runs on the same machine",
    )
