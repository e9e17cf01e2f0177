"""All wiring: ``serve run deployments.build:build --name foretoken pool=configs/pools/….yaml``."""

# Serve reads the annotation of ``build`` itself to check the arguments: it must not be a string.
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from app.config import ModelSettings, VllmEngineSettings, load_pool
from deployments.engine import EngineReplica
from deployments.hub import Hub
from deployments.ingress import HttpIngress
from deployments.request_router import PickedReplicaRouter

MAX_ONGOING_REQUESTS = 100_000
"""Streams and long polls stay open: the engines' schedulers, not Serve, decide who waits."""
FRACTION_OF_CPU = 0.1
"""What Ray reserves for a process of the application; a whole small pool fits two cores."""


class BuildArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pool: str
    """The pool's settings file, from the working directory."""


def build(args: BuildArgs) -> Application:
    """Raises app.config.SettingsError for settings that cannot be used."""
    settings = load_pool(args.pool)
    # Long polls never end of themselves: nothing to wait for.
    hub = _deploy(Hub, "Hub", graceful_shutdown_timeout_s=0.5).bind()
    engines = {model.name: _engine(model, hub) for model in settings.models}
    return _deploy(HttpIngress, "Ingress").bind(settings, hub, engines)


def _deploy(target: type[Any], name: str, **options: Any) -> serve.Deployment:
    options = {
        "ray_actor_options": {"num_cpus": FRACTION_OF_CPU},
        "graceful_shutdown_wait_loop_s": 0.2,
        # One line a request, and a second for each hub report, says nothing the metrics do not.
        "logging_config": {"enable_access_log": False},
        **options,
    }
    return serve.deployment(target).options(
        name=name,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=5,
        health_check_timeout_s=15,
        **options,
    )


def _engine(model: ModelSettings, hub: DeploymentHandle) -> Application:
    num_gpus = model.engine.num_gpus if isinstance(model.engine, VllmEngineSettings) else 0
    return _deploy(
        EngineReplica,
        f"engine-{model.name}",
        num_replicas=model.replicas,
        ray_actor_options={"num_cpus": FRACTION_OF_CPU, "num_gpus": num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=PickedReplicaRouter),
    ).bind(model, hub)
