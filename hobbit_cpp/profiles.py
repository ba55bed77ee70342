"""Settings that were found for one converted model (hobbit calibrate), in a small file beside it: NAME.profile.json.

Llama takes them where the caller gave none. What a profile holds:

    {"hobbit_profile": 1, "pair_id": ..., "settings": {"t1", "t2", "policy", "policy_weights", "low_fraction", "cache_bytes"},
     "found": what was promised and measured, for people}
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

from .settings import Settings

VERSION = 1
NAMES = ("t1", "t2", "policy", "policy_weights", "low_fraction", "cache_bytes")


@dataclass(frozen=True)
class Profile:
    """settings: arguments of Llama, those of NAMES that were found."""
    path: str
    pair_id: str
    settings: dict
    found: dict = field(default_factory=dict)

    def merged(self, given: dict) -> dict:
        """given, and the profile's settings where it has none. The thresholds belong together, and so do policy and weights:
        where one of two is given, neither is the profile's."""
        more = dict(self.settings)
        for pair in (("t1", "t2"), ("policy", "policy_weights")):
            if any(given.get(name) is not None for name in pair):
                for name in pair:
                    more.pop(name, None)
        return {**more, **{k: v for k, v in given.items() if v is not None}}

    def save(self) -> None:
        """OSError; nothing half-written."""
        temporary = f"{self.path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as f:
                json.dump({"hobbit_profile": VERSION, "pair_id": self.pair_id, "settings": self.settings, "found": self.found}, f, indent=1, allow_nan=False)
                f.write("\n")
            os.replace(temporary, self.path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise


def path_for(model: str) -> str:
    """Where the profile of a pair lies, by its main file."""
    return os.fspath(model).removesuffix(".gguf") + ".profile.json"


def read_profile(model: str, pair_id: str) -> Profile | None:
    """The profile beside a main file, None if there is none. ValueError, in one sentence, for one that is damaged, of
    another pair, or of a later version."""
    path = path_for(model)
    way_out = "remove it, or leave it aside with --no-profile (profile=False)"
    try:
        with open(path, encoding="utf-8") as f:
            data = json.load(f)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is no profile (not JSON): {way_out}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {way_out}") from None
    settings = data.get("settings") if isinstance(data, dict) else None
    if not isinstance(settings, dict) or not isinstance(data.get("hobbit_profile"), int) or not isinstance(data.get("found", {}), dict):
        raise ValueError(f"{path} is no profile of hobbit calibrate: {way_out}")
    if data["hobbit_profile"] > VERSION:
        raise ValueError(f"{path} is of version {data['hobbit_profile']}, this program knows {VERSION}: {way_out}")
    if data.get("pair_id") != pair_id:
        raise ValueError(f"{path} is the profile of another pair than {model}: calibrate again, {way_out}")
    for name in settings:
        if name not in NAMES:
            raise ValueError(f"{path}: {name} is no setting of a profile: {way_out}")
    try:
        Settings(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; {way_out}") from None
    return Profile(path, pair_id, settings, data.get("found", {}))
