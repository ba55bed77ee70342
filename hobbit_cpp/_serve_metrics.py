"""/metrics: what the server did and what the expert cache does, for Prometheus."""

from __future__ import annotations

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from ._version import __version__

# hobbit_NAME_total: help, {precision or kind: the counter of a layer}
BY_LAYER = {
    "expert_requests": ("Requests for an expert, by the rule's choice", "wanted", {"high": "wanted_high", "low": "wanted_low", "skip": "wanted_skip"}),
    "expert_hits": ("Requests that found their copy in a slot", "precision", {"high": "hits_high", "low": "hits_low"}),
    "expert_misses": ("Requests whose copy was not in a slot", "precision", {"high": "misses_high", "low": "misses_low"}),
    "expert_skips": ("Requests that were skipped", "", {"": "skips"}),
    "expert_loads": ("Copies brought into slots", "precision", {"high": "loads_high", "low": "loads_low"}),
    "expert_evictions": ("Copies that gave up their slot", "", {"": "evictions"}),
    "expert_read_bytes": ("Bytes brought into slots", "", {"": "bytes_read"}),
}
TOTALS = {
    "expert_prefetches": ("Copies loaded ahead", {"": "prefetches"}, 1),
    "expert_prefetch_hits": ("Copies loaded ahead that were used", {"": "prefetch_hits"}, 1),
    "expert_predicted_loads": ("Copies loaded ahead because the next layers' routers were predicted", {"": "predicted_loads"}, 1),
    "expert_predicted_useful": ("Of those, copies that served their layer", {"": "useful"}, 1),
    "expert_wasted_bytes": ("Bytes of predicted copies that did not", {"": "bytes_wasted"}, 1),
    "expert_leaned_requests": ("Requests for another expert than the router alone would have chosen", {"": "leaned"}, 1),
    "expert_cpu_bytes": ("Bytes of missed experts that the CPU computed with", {"": "bytes_cpu"}, 1),
    "forward_passes": ("Forward passes", {"": "graphs"}, 1),
    "seconds": ("Seconds of forward passes, by what they went to", {"computing": "compute_us", "waiting": "wait_us", "planning": "plan_us"}, 1e-6),
}


class OffloadCollector:
    """Reads offload_stats() when it is asked for."""

    def __init__(self, llm, name: str):
        self.llm, self.name = llm, name

    def describe(self):
        return []

    def collect(self):
        yield InfoMetricFamily("hobbit", "The server", value={"version": __version__, "model": self.name})
        try:
            s = self.llm.offload_stats()
        except RuntimeError:  # closed: the server is stopping
            return
        if s["mode"] == "none":
            return
        for name, (text, label, parts) in BY_LAYER.items():
            family = CounterMetricFamily(f"hobbit_{name}", text, labels=["layer", *([label] if label else [])])
            for layer in s["layers"]:
                for value, key in parts.items():
                    family.add_metric([str(layer["block"]), *([value] if label else [])], layer[key])
            yield family
        for name, (text, parts, scale) in TOTALS.items():
            family = CounterMetricFamily(f"hobbit_{name}", text, labels=["kind"] if len(parts) > 1 else [])
            for value, key in parts.items():
                family.add_metric([value] if len(parts) > 1 else [], s["totals"][key] * scale)
            yield family
        for key in ("budget_bytes", "floor_bytes", "slot_bytes", "staging_bytes", "record_bytes", "high_bytes", "low_bytes", "host_bytes"):
            yield GaugeMetricFamily(f"hobbit_{key}", f"{key} of the budget, as in offload_stats()", value=s["budget"][key])
        for name, text in (("slots", "Slots"), ("resident", "Slots that hold a copy")):
            family = GaugeMetricFamily(f"hobbit_{name}", text, labels=["group", "precision"])
            for i, group in enumerate(s["groups"]):
                for precision in ("high", "low"):
                    family.add_metric([str(i), precision], group[f"{precision}_{name}"])
            yield family
        for name in ("t1", "t2"):
            yield GaugeMetricFamily(f"hobbit_{name}", f"Threshold {name.upper()} in force", value=s["settings"][name])


class Metrics:
    """queue: a Queue. All metrics of one server, in a registry of their own."""

    def __init__(self, llm, name: str, queue):
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        self.registry.register(OffloadCollector(llm, name))
        self.requests = prometheus.Counter("hobbit_http_requests", "Answered requests", ["path", "status"], registry=self.registry)
        self.seconds = prometheus.Histogram("hobbit_http_request_seconds", "From a request's arrival to the end of its answer", ["path"], registry=self.registry,
                                            buckets=(0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600))
        self.tokens = prometheus.Counter("hobbit_tokens", "Tokens that went through the model", ["kind"], registry=self.registry)
        self.gone = prometheus.Counter("hobbit_disconnects", "Clients that left before their answer was complete", registry=self.registry)
        for kind in ("prompt", "decode"):
            self.tokens.labels(kind)
        for name, text in (("waiting", "Requests that wait for the model"), ("running", "Requests that have the model")):
            prometheus.Gauge(f"hobbit_queue_{name}", text, registry=self.registry).set_function(lambda name=name: getattr(queue, name))

    def count_tokens(self, last) -> None:
        """last: the last_stats of a finished or cancelled generation."""
        for kind in ("prompt", "decode"):
            self.tokens.labels(kind).inc(last[kind]["evaluated"])

    def text(self) -> bytes:
        return prometheus.generate_latest(self.registry)

    content_type = prometheus.CONTENT_TYPE_LATEST
