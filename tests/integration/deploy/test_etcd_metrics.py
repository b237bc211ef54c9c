"""The series of etcd that the alerts read are those that a real etcd exports."""

from __future__ import annotations

import re
import urllib.request

from tests.support.promql import ETCD


def test_a_real_etcd_exports_what_the_alerts_read(etcd_endpoint: str) -> None:
    """By name, in its own /metrics."""
    with urllib.request.urlopen(f"http://{etcd_endpoint}/metrics", timeout=30) as answer:
        exported = set(re.findall(r"^(\w+)[{ ]", answer.read().decode(), re.MULTILINE))
    assert exported >= ETCD
