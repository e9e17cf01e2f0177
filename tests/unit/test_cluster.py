"""The cluster's files parse, and say the same as the project's own."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_ray_service_serves_the_same_application_as_serve_config() -> None:
    service = read(CLUSTER / "rayservice.yaml")

    assert service["kind"] == "RayService"
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == read(ROOT / "serve_config.yaml")


def test_ray_service_has_the_gpus_that_the_pool_asks_for() -> None:
    service = read(CLUSTER / "rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    pool = read(ROOT / application["args"]["pool"])

    offered = sum(
        group["replicas"] * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        for container in group["template"]["spec"]["containers"]
    )
    asked = sum(model.get("replicas", 1) * model["engine"]["num_gpus"] for model in pool["models"])
    assert offered == asked


def test_every_node_runs_one_ray_and_the_project_allows_it() -> None:
    service = read(CLUSTER / "rayservice.yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "ray")

    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    assert version in ray.specifier
    assert f"FROM rayproject/ray:{version}-" in (CLUSTER / "Dockerfile").read_text()


def test_every_image_is_the_one_that_the_dockerfile_builds() -> None:
    (built,) = re.findall(r"docker build .* -t (\S+) ", (CLUSTER / "Dockerfile").read_text())
    cluster = read(CLUSTER / "rayservice.yaml")["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]

    images = {c["image"] for pod in pods for c in pod["template"]["spec"]["containers"]}
    assert images == {built}
    assert read(CLUSTER / "ray-launcher.yaml")["docker"]["image"] == built


def test_launcher_meets_rays_own_schema() -> None:
    ray = find_spec("ray")
    assert ray is not None
    assert ray.submodule_search_locations is not None
    schema = Path(ray.submodule_search_locations[0]) / "autoscaler" / "ray-schema.json"

    jsonschema.validate(read(CLUSTER / "ray-launcher.yaml"), json.loads(schema.read_text()))
