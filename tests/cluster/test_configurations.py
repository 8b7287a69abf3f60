"""What can be known of the cluster files without a cloud: that Ray would take them, and as what.

The start lines are run by a shell with a program named ``ray`` that only tells what it was given.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra 'ray')")
jsonschema = pytest.importorskip("jsonschema", reason="ray[default] is not installed")

FOLDER = Path(__file__).parents[2] / "cluster"
CLUSTERS = ("aws", "gcp", "onprem")
CLOUDS = ("aws", "gcp")
PROFILE = "lightning-bnn-"
# With these a host that falls silent is noticed in 20 s; with Ray's own, not in 390 s.
KEEP_ALIVE = {
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
ENVIRONMENT = {**KEEP_ALIVE, "RAY_AUTH_MODE": "token", "PIP_NO_DEPS": "1"}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def prepared(name: str) -> dict[str, Any]:
    """A configuration as ``ray up`` completes it."""
    from ray.autoscaler._private.util import prepare_config

    return prepare_config(read(name))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_takes_the_configuration(name: str) -> None:
    from ray.autoscaler._private.util import validate_config

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(read(name), schema)
    validate_config(prepared(name))
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**prepared(name), "max_worker": 3})  # the check sees a wrong word


# ------------------------------------------------------------------------------ start lines


@pytest.fixture
def told(tmp_path: Path) -> Any:
    """Runs a line in bash, and gives the words and the environment that ``ray`` was called with."""
    program = tmp_path / "ray"
    program.write_text(
        f"#!{sys.executable} -IS\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    program.chmod(0o755)

    def run(line: str) -> tuple[list[str], dict[str, str]]:
        environment = {"PATH": f"{tmp_path}:{os.defpath}", "RAY_HEAD_IP": "192.0.2.10"}
        done = subprocess.run(
            ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        words, seen = json.loads(done.stdout)
        return words, seen

    return run


@pytest.mark.parametrize("kind", ["head", "worker"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_every_process_of_ray_gets_the_settings(told: Any, name: str, kind: str) -> None:
    from ray.scripts.scripts import start

    stop, line = prepared(name)[f"{kind}_start_ray_commands"]
    assert told(stop)[0] == ["stop"]
    words, environment = told(line)
    assert {setting: environment.get(setting) for setting in ENVIRONMENT} == ENVIRONMENT
    assert "RAY_AUTH_TOKEN" not in environment
    assert words[0] == "start"
    options = start.make_context("start", words[1:]).params  # as Ray itself reads them
    if kind == "head":
        assert (options["head"], options["num_cpus"], options["num_gpus"]) == (True, 0, 0)
        assert options["autoscaling_config"] == "~/ray_bootstrap_config.yaml"
        assert options["dashboard_host"] in (None, "localhost", "127.0.0.1")
    else:
        assert (options["head"], options["address"]) == (False, "192.0.2.10:6379")
        assert options["num_cpus"] is None  # all that the worker has


@pytest.mark.parametrize("setting", KEEP_ALIVE)
def test_ray_knows_the_setting(setting: str) -> None:
    # a name that it does not know would be passed over in silence
    library = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    if not library.exists():
        pytest.skip(f"this build of Ray has no {library.name}")
    with (
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents,
    ):
        assert contents.find(setting.removeprefix("RAY_").encode() + b"\0") != -1
        assert contents.find(b"grpc_client_keepalive_time_m_\0") == -1


# ------------------------------------------------------------------------------ machines


@pytest.mark.parametrize("name", CLOUDS)
def test_the_head_offers_nothing_and_workers_are_few_and_spot(name: str) -> None:
    config = prepared(name)
    types = dict(config["available_node_types"])
    head = types.pop(config["head_node_type"])
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert head["max_workers"] == 0
    (worker,) = types.values()
    assert worker["min_workers"] == 0
    assert worker["max_workers"] == config["max_workers"] > 0
    markets = {
        "aws": lambda machine: machine.get("InstanceMarketOptions", {}).get("MarketType"),
        "gcp": lambda machine: machine.get("scheduling", {}).get("provisioningModel", "").lower(),
    }
    assert markets[name](worker["node_config"]) == "spot"
    assert not markets[name](head["node_config"])
    assert config["idle_timeout_minutes"] > 2  # more than the longest pause before a retry


def test_a_cloud_in_memory_gives_the_machines_of_aws_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moto = pytest.importorskip("moto", reason="moto is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray keeps the key pair there
    (tmp_path / ".ssh").mkdir()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # hundreds, which take seconds
    config = prepared("aws")
    with moto.mock_aws():
        from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

        ec2 = boto3.client("ec2", region_name=config["provider"]["region"])
        image = ec2.register_image(Name="ubuntu")["ImageId"]
        iam = boto3.client("iam")
        for kind, node in config["available_node_types"].items():
            machine = node["node_config"]  # what is to be filled in
            assert machine["ImageId"] == "ami-00000000000000000"
            assert machine["IamInstanceProfile"]["Arn"].endswith(
                f"000:instance-profile/{PROFILE}{kind}"
            )
            made = iam.create_instance_profile(InstanceProfileName=f"{PROFILE}{kind}")
            machine["ImageId"] = image
            machine["IamInstanceProfile"] = {"Arn": made["InstanceProfile"]["Arn"]}
        config = AWSNodeProvider.bootstrap_config(config)
        config = AWSNodeProvider.fillout_available_node_types_resources(config)
        types = config["available_node_types"]
        assert types["head"]["resources"] == {"CPU": 0, "GPU": 0}
        assert (types["worker"]["resources"]["CPU"], types["worker"]["resources"]["GPU"]) == (4, 1)
        provider = AWSNodeProvider(config["provider"], config["cluster_name"])
        provider.create_node(types["worker"]["node_config"], {"ray-node-type": "worker"}, 1)
        (reservation,) = ec2.describe_instances()["Reservations"]
        (machine,) = reservation["Instances"]
    assert machine["InstanceLifecycle"] == "spot"
    assert machine["IamInstanceProfile"]["Arn"].endswith(f"{PROFILE}worker")


# ------------------------------------------------------------------------------ what is installed


def pins(name: str) -> dict[str, str]:
    (line,) = (one for one in read(name)["setup_commands"] if "pip install" in one)
    return dict(re.findall(r"([a-z-]+)(?:\[[a-z,]+\])?==([0-9.]+)", line))


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_nodes_get_the_wheel_and_the_same_versions(name: str) -> None:
    packaging = pytest.importorskip("packaging.requirements", reason="packaging is not installed")
    config = read(name)
    assert set(pins(name)) == {"ray", "torch", "pytorch-lightning"}
    assert pins(name) == pins("aws")
    assert config["file_mounts"]["~/wheels"] == "dist"
    assert any("~/wheels/lightning_bnn-*.whl" in line for line in config["setup_commands"])
    wanted = [packaging.Requirement(text) for text in requires("lightning-bnn") or []]
    for requirement in wanted:
        if version := pins(name).get(requirement.name):
            assert requirement.specifier.contains(version), requirement


# ------------------------------------------------------------------------------ the token


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_token_travels_as_a_file(name: str) -> None:
    assert read(name)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def secrets_in(text: str) -> list[str]:
    return re.findall(r"[0-9A-Fa-f]{16,}|RAY_AUTH_TOKEN=\S*", text.replace("-", ""))


def test_no_file_holds_a_token() -> None:
    from ray._private.authentication.authentication_token_generator import (
        generate_new_authentication_token,
    )

    assert secrets_in(f"token: {generate_new_authentication_token()}")
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert {path.name for path in files} == {
        "README.md", "aws.yaml", "gcp.yaml", "onprem.yaml", "kuberay-rayjob.yaml", "launch.py",
    }  # fmt: skip
    for path in files:
        found = [one for one in secrets_in(path.read_text()) if set(one) != {"0"}]
        assert not found, path


# ------------------------------------------------------------------------------ Kubernetes


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return read("kuberay-rayjob")


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """All containers of a manifest, and the options of the one that the operator adds."""
    if isinstance(value, dict):
        yield from value.get("containers", [])
        if "autoscalerOptions" in value:
            yield value["autoscalerOptions"]
        for part in value.values():
            yield from containers(part)
    elif isinstance(value, list):
        for part in value:
            yield from containers(part)


def test_every_container_gets_the_settings_and_the_token_of_the_secret(job: dict[str, Any]) -> None:
    found = list(containers(job))
    assert [one.get("name") for one in found] == [
        "ray-job-submitter", None, "ray-worker", "ray-head",
    ]  # fmt: skip
    secret = job["spec"]["rayClusterSpec"]["authOptions"]["secretName"]
    for container in found:
        variables = {variable["name"]: variable for variable in container["env"]}
        token = variables.pop("RAY_AUTH_TOKEN")
        assert token == {
            "name": "RAY_AUTH_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": secret, "key": "auth_token"}},
        }
        assert {name: variable["value"] for name, variable in variables.items()} == ENVIRONMENT


def test_the_autoscaler_of_ray_reads_the_groups(job: dict[str, Any]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )
    from ray.autoscaler._private.util import validate_config

    cluster = {
        "metadata": {"name": job["metadata"]["name"], "namespace": "default"},
        "spec": job["spec"]["rayClusterSpec"],
    }
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert cluster["spec"]["rayVersion"] == pins("aws")["ray"]
    assert cluster["spec"]["authOptions"]["mode"] == "token"
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    validate_config(config)
    types = dict(config["available_node_types"])
    head = types.pop(config["head_node_type"])
    assert (head["resources"]["CPU"], head["resources"]["GPU"]) == (0, 0)
    (worker,) = types.values()
    assert (worker["resources"]["CPU"], worker["resources"]["GPU"]) == (4, 1)
    assert (worker["min_workers"], worker["max_workers"]) == (0, 4)
    assert config["idle_timeout_minutes"] == 10
