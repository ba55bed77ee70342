"""The settings of hobbit serve: flags before environment (HOBBIT_SERVE_PORT=...) before configuration file before defaults.

The names are those of the flags, with _ for -. Needs the extra `server`.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .memory import parse_bytes
from .settings import MISS, POLICIES, PREFETCH_COPY

PREFIX = "HOBBIT_SERVE_"

Size = Union[int, str]


class ServeSettings(BaseModel):
    """model and how it is loaded; how it is served. Sizes are bytes or text such as "8GiB"."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    alias: List[str] = []
    ctx: Optional[int] = Field(None, ge=1)
    batch: int = Field(512, ge=1)
    ubatch: int = Field(512, ge=1)
    threads: Optional[int] = Field(None, ge=1)
    gpu_layers: Optional[int] = Field(None, ge=-1)
    chat_format: Optional[str] = None
    embedding: bool = False
    pooling: Optional[Literal["mean", "cls", "last"]] = None
    logits_all: bool = False
    lora: Optional[str] = None
    verbose: bool = False

    t1: Optional[float] = None
    t2: Optional[float] = None
    skip_mass: Optional[float] = None
    cache: Optional[Size] = None
    policy: Optional[Literal[POLICIES]] = None
    low_fraction: Optional[float] = None
    io_threads: Optional[int] = None
    no_direct_io: bool = False
    verify: bool = False
    host_copies: Optional[Size] = None
    unified_memory: Optional[Literal["auto", "on", "off"]] = None
    miss: Optional[Literal[MISS]] = None
    prefetch: Optional[Union[int, Literal["auto"]]] = None
    prefetch_copy: Optional[Literal[PREFETCH_COPY]] = None
    prefetch_ranks: Optional[int] = None
    no_prompt_prefetch: bool = False
    lean: Optional[float] = None
    no_profile: bool = False

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key: List[str] = []
    cors_origin: List[str] = []
    root_path: str = ""
    ssl_keyfile: Optional[str] = None
    ssl_certfile: Optional[str] = None
    max_body: int = Field(4 * 2**20, ge=1)
    max_queue: int = Field(512, ge=1)
    max_tokens: Optional[int] = Field(None, ge=1)
    client_timeout: float = Field(60, gt=0)
    grace: int = Field(10, ge=0)

    @field_validator("max_body", mode="before")
    @classmethod
    def _size(cls, value):
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("alias", "api_key", "cors_origin", mode="before")
    @classmethod
    def _one_or_several(cls, value):
        return [v for v in value.split(",") if v] if isinstance(value, str) else value


def read_config(path: str) -> Dict[str, Any]:
    """A JSON or YAML file, by its suffix. ValueError for one that holds no settings."""
    with open(path, "rb") as f:
        data = f.read()
    try:
        if path.lower().endswith((".yaml", ".yml")):
            import yaml
            try:
                values = yaml.safe_load(data)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
        elif path.lower().endswith(".json"):
            values = json.loads(data)
        else:
            raise ValueError("a configuration file is called .json, .yaml or .yml")
        if not isinstance(values, dict):
            raise ValueError("it must hold names and values, such as model: my.gguf")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return values


def read_environment(environment=os.environ) -> Dict[str, str]:
    values = {k[len(PREFIX):].lower(): v for k, v in environment.items() if k.startswith(PREFIX)}
    values.pop("config", None)
    return values


def settings(flags: Dict[str, Any], config: Optional[str] = None, environment=os.environ) -> ServeSettings:
    """The three sources together. ValueError in one sentence that says where the wrong value came from."""
    config = config or environment.get(PREFIX + "CONFIG")
    sources = [(config, read_config(config) if config else {}), ("environment", read_environment(environment)), ("", flags)]
    merged, origin = {}, {}
    for name, values in sources:
        for key, value in values.items():
            merged[key], origin[key] = value, name
    try:
        return ServeSettings.model_validate(merged)
    except ValidationError as error:
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")  # a misspelt name explains a missing one
        key = str(first["loc"][0])
        if first["type"] == "missing":
            raise ValueError(f"no {key} is given: hobbit serve MODEL.gguf, {PREFIX}{key.upper()}, or {key} in the configuration file") from None
        where = {"": f"--{key.replace('_', '-')}", "environment": PREFIX + key.upper()}.get(origin.get(key), f"{origin.get(key)}: {key}")
        said = first["msg"].removeprefix("Value error, ")
        what = "there is no such setting" if first["type"] == "extra_forbidden" else said[0].lower() + said[1:]
        secret = key == "api_key" or first["type"] == "extra_forbidden"
        raise ValueError(f"{where}: {what}" + ("" if secret or repr(first["input"]) in said else f", not {first['input']!r}")) from None
