"""TLS, node keys, and a reverse proxy that lets nothing through but the Fleet API."""

import http.client
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from personax.live import certificates
from tests.flower.deployment import Deployment, Run, free_port, wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIG = Path(__file__).parents[2] / "examples" / "flower" / "nginx.conf"
CONTROL = "/v1/control/list-runs"
pytestmark = pytest.mark.skipif(not NGINX or not shutil.which("ssh-keygen"), reason="needs nginx and ssh-keygen")


class Proxied(Deployment):
    """As `docs/flower.md` sets it up: nodes reach the SuperLink through nginx alone, and only with a key."""

    def __init__(self, folder):
        super().__init__(folder)
        self.outside, self.certified = free_port(), self.folder / "certificates" / "server"
        certificates.create(self.folder / "certificates", ["127.0.0.1", "localhost"], [])
        names = {"certfile": "cert.pem", "keyfile": "key.pem", "ca-certfile": "ca.pem"}
        files = [word for name, file in names.items() for word in (f"--ssl-{name}", str(self.certified / file))]
        self.link = ("--enable-supernode-auth", *files)
        trusted = ("--root-certificates", str(self.certified / "ca.pem"))
        self.node = (*trusted, "--superlink", f"127.0.0.1:{self.outside}")
        self.connect(f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.certified / "ca.pem"}"')

    def begin_proxy(self):
        text = CONFIG.read_text().replace("listen 443", f"listen 127.0.0.1:{self.outside}")
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        text = text.replace("/etc/personax/certificates/server", str(self.certified))
        place = self.folder / "nginx.conf"
        place.write_text(f"daemon off;\npid {self.folder}/nginx.pid;\nerror_log stderr;\n{text}")
        self.begin("nginx", NGINX, "-p", str(self.folder), "-e", "stderr", "-c", str(place))
        wait_until(lambda: self.status(self.outside, "/") is not None, 20, lambda: self.log("nginx"))

    def key(self, name):
        path = self.folder / f"{name}.key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path)], check=True)
        return path

    def status(self, port, path, method="POST"):
        """Connect as a stranger with the authority's certificate but without a key."""
        context = ssl.create_default_context(cafile=str(self.certified / "ca.pem"))
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
        try:
            connection.request(method, path, body=b"", headers={"content-type": "application/protobuf"})
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = Proxied(tmp_path_factory.mktemp("proxied"))
    try:
        made.begin_link()
        made.begin_proxy()
        yield made
    finally:
        made.close()


def test_the_control_api_needs_no_password_and_the_proxy_hides_it(deployment):
    assert deployment.status(deployment.port, CONTROL) == 200  # hence the warning in docs/flower.md
    assert deployment.status(deployment.outside, CONTROL) == 403
    for path in ("/", "/docs", "/health", "/openapi.json", "/v1/runtime/pull-messages", CONTROL.upper()):
        assert deployment.status(deployment.outside, path) == 403, path
    for path in ("/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "//v1/control/list-runs"):
        assert deployment.status(deployment.outside, path) == 403, path
    for path in ("/v1/fleet/%252e%252e/control/list-runs", "/v1/fleet/..;/control/list-runs", "/v1/fleet/..%5ccontrol"):
        assert deployment.status(deployment.outside, path) in (400, 401, 403, 404), path
    assert deployment.status(deployment.outside, "/v1/fleet/pull-messages") in (400, 401, 422)  # asked, and refused


def test_only_a_registered_key_takes_part_and_all_goes_through_the_proxy(deployment):
    known, stranger = deployment.key("anna"), deployment.key("bert")
    deployment.begin_node("bert", "--auth-supernode-private-key", str(stranger))
    deployment.flwr("supernode", "register", f"{known}.pub", "deployment", "--name", "anna")
    deployment.begin_node("anna", "--auth-supernode-private-key", str(known))
    run = Run(deployment, "FedAvg", 1, "proxied", num_clients=1)
    run.begin()
    run.wait_for_end()
    assert [line["client"] for line in run.uploads] == ["anna"]
    wait_until(lambda: deployment.processes["bert"].poll() not in (None, 0), 60, lambda: deployment.log("bert"))
