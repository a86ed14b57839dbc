"""docker/ by the rules of those who read it: hadolint, the Compose and Kubernetes schemas, systemd, cron."""

import configparser
import re
import shutil
import subprocess
import sys
from datetime import UTC
from datetime import datetime
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from cronsim import CronSim
from dockerfile_steps import DOCKER
from dockerfile_steps import ROOT
from dockerfile_steps import steps_of

BIN = Path(sys.executable).parent
DOCKERFILES = ["Dockerfile.api", "Dockerfile.tuner"]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
UNITS = sorted(path for path in (DOCKER / "schedules").iterdir() if path.suffix in (".service", ".timer"))
PINNED = re.compile(r"[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
SECRET = re.compile(
    r"(?<!ServiceAccount)(password|passwd|secret|token)\w*\s*[:=]\s*['\"]?(?P<value>[^\s'\"#,}]+)", re.IGNORECASE
)


def documents():
    return [(path.name, document) for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def pods():
    """The pod of every workload, with its name."""
    for _, document in documents():
        spec = document["spec"]
        if document["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if document["kind"] != "Service":
            yield document["metadata"]["name"], spec["template"]["spec"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name):
    said = subprocess.run([BIN / "hadolint", DOCKER / name], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout + said.stderr) == (0, "")


def test_hadolint_would_say_it(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /opt && pip install kdatune\n")
    said = subprocess.run([BIN / "hadolint", bad], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert {"DL3007", "DL3003"} <= set(re.findall(r"DL\d{4}", said.stdout))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_pinned_run_as_a_number_and_hold_no_secret(name):
    steps = steps_of(name)
    stages = {step.value.split(" AS ")[1] for step in steps if step.instruction == "FROM" and " AS " in step.value}
    bases = [step.value.split(" AS ")[0] for step in steps if step.instruction == "FROM"]
    assert all(base in stages or PINNED.fullmatch(base) for base in bases)
    assert [step.value for step in steps if step.instruction == "USER"] == ["10001:10001"]
    last = max(i for i, step in enumerate(steps) if step.instruction == "FROM")
    after_user = False
    for step in steps[last:]:
        after_user |= step.instruction == "USER"
        assert not (after_user and step.instruction in ("RUN", "COPY", "ADD")), "nothing is built as the running user"
    env = " ".join(step.value for step in steps if step.instruction in ("ENV", "ARG"))
    assert "PASSWORD" not in env
    assert "TOKEN" not in env


def test_the_context_lets_only_the_sources_in():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for name in DOCKERFILES
        for step in steps_of(name)
        if step.instruction == "COPY" and "--from=" not in step.value
        for source in step.value.split()[:-1]
    }
    assert allowed == copied


@pytest.mark.parametrize("name", ["compose.yaml", "compose.profiling.yaml"])
def test_compose_files_are_of_the_schema(name):
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / name]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr


def test_every_compose_service_is_closed():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert ("build" in service) != bool(PINNED.fullmatch(service["image"])), name
        assert int(service.get("user", "10001").split(":")[0]) > 0, name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name


def test_the_schema_is_there_before_it_is_used():
    services = COMPOSE["services"]
    assert services["migrate"]["command"] == ["db", "upgrade"]
    assert services["migrate"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    done = {"condition": "service_completed_successfully"}
    assert services["api"]["depends_on"] == {"token": done}
    assert services["token"]["depends_on"] == {"migrate": done}
    assert services["nightly"]["depends_on"] == {"migrate": done}
    for name, pod in pods():
        assert pod["initContainers"][0]["args"] == ["db", "upgrade"], name


def test_volumes_are_declared_and_all_used():
    used = {volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service.get("volumes", ())}
    assert used == set(COMPOSE["volumes"])


def test_no_file_holds_a_secret():
    files = [path for path in DOCKER.rglob("*") if path.is_file()]
    for path in files:
        for found in SECRET.finditer(path.read_text()):
            value = found["value"]
            # an empty line to fill in, a reference, a name
            assert value.startswith(("$", "{", "[", "kdatune-database", "<")) or not value, f"{path.name}: {found[0]}"
    ignored = subprocess.run(["git", "check-ignore", "-q", "docker/.env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


@pytest.mark.parametrize("version", ["1.33", kubernetes_validate.latest_version()])
def test_manifests_are_of_the_kubernetes_schema(version):
    kinds = []
    for _, document in documents():
        assert kubernetes_validate.validate(document, version, strict=True)
        kinds.append(document["kind"])
    assert sorted(kinds) == ["CronJob", "Deployment", "Job", "Service"]


def test_a_wrong_manifest_is_not_of_it():
    (job,) = [document for _, document in documents() if document["kind"] == "Job"]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_every_pod_is_closed():
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 10001, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, name
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert container["securityContext"] == {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }, name
            secrets = {e["name"]: e["valueFrom"]["secretKeyRef"]["name"] for e in container["env"]}
            assert secrets == {"KDATUNE_DATABASE_URL": "kdatune-database", "PGPASSWORD": "kdatune-database"}


def test_one_night_at_a_time_and_one_worker_a_card():
    found = {document["kind"]: document["spec"] for _, document in documents()}
    night = found["CronJob"]
    assert night["concurrencyPolicy"] == "Forbid"
    assert night["jobTemplate"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [3]
    fleet = found["Job"]
    assert (fleet["completionMode"], fleet["completions"]) == ("Indexed", fleet["parallelism"])
    (worker,) = fleet["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "--workers=all" in worker["args"]


def test_the_service_finds_its_pods():
    found = {document["kind"]: document for _, document in documents()}
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    (served,) = found["Service"]["spec"]["ports"]
    assert (served["targetPort"], port["containerPort"]) == (port["name"], 8321)
    assert {container[p]["httpGet"]["path"] for p in ("startupProbe", "livenessProbe")} == {"/healthz"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


KNOWN = {
    "Unit": {"Description", "After", "Wants"},
    "Install": {"WantedBy"},
    "Timer": {"OnCalendar", "RandomizedDelaySec", "Persistent", "Unit"},
    "Service": {
        "Type", "ExecStartPre", "ExecStart", "EnvironmentFile", "Environment", "Restart", "RestartSec", "User", "Group",
        "TimeoutStartSec", "TimeoutStopSec", "StateDirectory", "StateDirectoryMode", "WorkingDirectory",
        "NoNewPrivileges", "CapabilityBoundingSet", "PrivateTmp", "PrivateDevices", "ProtectSystem", "ProtectHome",
        "ProtectControlGroups", "ProtectKernelModules", "ProtectKernelTunables", "RestrictAddressFamilies",
        "RestrictSUIDSGID", "LockPersonality",
    },
}  # fmt: skip


class _Repeated(dict):
    """A section in which a key that is given again keeps both values."""

    def __setitem__(self, key, value):
        if key in self and isinstance(value, list):
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def unit_of(path):
    parser = configparser.RawConfigParser(
        dict_type=_Repeated, strict=False, delimiters=("=",), comment_prefixes=("#", ";"), empty_lines_in_values=False
    )
    parser.optionxform = str
    parser.read_string(path.read_text())
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_hold_known_keys_only(path):
    unit = unit_of(path)
    assert {(s, key) for s in unit.sections() for key in unit[s] if key not in KNOWN[s]} == set()
    assert unit["Unit"]["Description"].startswith("kdatune")


def test_the_timer_starts_the_night():
    timer = unit_of(DOCKER / "schedules" / "kdatune-nightly.timer")
    assert (DOCKER / "schedules" / timer["Timer"]["Unit"]).exists()
    assert timer["Timer"]["Persistent"] == "true"
    night = unit_of(DOCKER / "schedules" / "kdatune-nightly.service")
    assert night["Service"]["Type"] == "oneshot"
    assert "kdatune nightly" in night["Service"]["ExecStart"]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd here; the known keys are checked all the same"
)
def test_systemd_accepts_the_units(tmp_path):
    program = tmp_path / "kdatune"  # it must exist where the unit says
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    units = [tmp_path / path.name for path in UNITS]
    for path, unit in zip(UNITS, units, strict=True):
        unit.write_text(path.read_text().replace("/opt/kdatune/bin/kdatune", str(program)))
    said = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert [line for line in said.stderr.splitlines() if "kdatune" in line] == []
    assert said.returncode == 0, said.stderr
    units[0].write_text(units[0].read_text().replace("ExecStart=/", "ExecStart=nowhere/"))
    broken = subprocess.run(["systemd-analyze", "verify", units[0]], capture_output=True, text=True, check=False)
    assert "kdatune" in broken.stderr


def crontab():
    """The schedules of the crontab: (five fields, command)."""
    lines = (DOCKER / "schedules" / "kdatune.crontab").read_text().splitlines()
    jobs = [line for line in lines if line and not line.startswith("#") and not re.match(r"\w+=", line)]
    return [(" ".join(job.split()[:5]), job.split(maxsplit=5)[5]) for job in jobs]


def test_the_crontab_starts_one_night_a_day():
    ((fields, command),) = crontab()
    nights = CronSim(fields, datetime(2026, 2, 27, 12, tzinfo=UTC))
    assert [next(nights).isoformat() for _ in range(3)] == [
        f"2026-0{day}T02:00:00+00:00" for day in ("2-28", "3-01", "3-02")
    ]
    assert "%" not in command  # cron would take it for the end of the line
    parsed = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert (parsed.returncode, parsed.stderr) == (0, "")


def test_all_schedules_mean_the_same_hour():
    ((fields, _),) = crontab()
    found = {document["kind"]: document["spec"] for _, document in documents()}
    timer = unit_of(DOCKER / "schedules" / "kdatune-nightly.timer")
    assert found["CronJob"]["schedule"] == fields == "0 2 * * *"
    assert timer["Timer"]["OnCalendar"] == "*-*-* 02:00:00"
