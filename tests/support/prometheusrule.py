"""Writes the rules of ``deploy/prometheus`` as a PrometheusRule: ``python -m tests.support.prometheusrule`` renews it.

*Runs in* a contributor's shell. *Owns* ``k8s/components/monitoring/rules.yaml``, which nobody edits by hand.
"""

from __future__ import annotations

from tests.support.deployment import PROMETHEUS, ROOT

FILE = ROOT / "k8s/components/monitoring/rules.yaml"
SOURCES = ("rules.yml", "alerts.yml")
_HEAD = """\
# The recording rules and alerts of deploy/prometheus, for the Prometheus operator. Written by
# `python -m tests.support.prometheusrule`; change them there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: elastic-trainer
  labels: { app.kubernetes.io/name: prometheus-rules, release: kube-prometheus-stack }
spec:
  groups:
"""


def text() -> str:
    """The manifest: the groups of all files, as they are written there."""
    lines = [line for name in SOURCES for line in _groups((PROMETHEUS / name).read_text(encoding="utf-8"))]
    return _HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


def _groups(source: str) -> list[str]:
    return source.partition("\ngroups:\n")[2].rstrip("\n").split("\n")


def main() -> None:
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
