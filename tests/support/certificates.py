"""A certificate authority for one test, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from elastic_trainer.local.hosts import reachable
from tests.support.requirements import needs


class Authority:
    """Issues certificates below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._openssl = needs("openssl", "it makes the certificates for TLS tests")
        self._directory = directory
        self.certificate = directory / "ca.pem"
        self._key = directory / "ca-key.pem"
        directory.mkdir(parents=True, exist_ok=True)
        self._run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=test authority", "-keyout", self._key, "-out", self.certificate),
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key for ``name``, valid for localhost as server and as client."""
        certificate, key, request = (self._directory / f"{name}{end}" for end in (".pem", "-key.pem", ".csr"))
        extensions = self._directory / f"{name}.ext"
        names = ",".join(dict.fromkeys(("DNS:localhost", "IP:127.0.0.1", f"IP:{reachable()}")))
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._run(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
        )
        self._run(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", "2", "-extfile", extensions, "-out", certificate),
        )
        return certificate, key

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run([self._openssl, *map(str, arguments)], check=True, capture_output=True, timeout=60)
