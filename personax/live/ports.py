"""The port of a server, with mutual TLS or on loopback only; and the limits set in gRPC."""

import contextlib
import ipaddress
from typing import Any

import grpc

from personax.experiment.config import Terms
from personax.live.certificates import Credentials
from personax.live.messages import FRAME, PIECE


def options(terms: Terms, upload_bytes: int) -> list[tuple[str, int]]:
    """The limits set in gRPC. The longest message from a client is a piece of an upload, or a report."""
    return [
        ("grpc.max_receive_message_length", max(min(upload_bytes, PIECE) + (1 << 16), 1 << 20)),
        ("grpc.max_send_message_length", PIECE + (1 << 16)),
        ("grpc.max_metadata_size", 1 << 14),
        ("grpc.http2.max_frame_size", FRAME),
        ("grpc.max_concurrent_streams", 4 * terms.max_streams),
        ("grpc.max_allowed_incoming_connections", terms.max_connections),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 600_000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
    ]


def listen(server: Any, address: str, credentials: Credentials | None) -> int:
    """Open the port, with mutual TLS or on loopback without TLS; return its number."""
    if credentials is None:
        require_loopback(address)
        return server.add_insecure_port(address)
    pair = [(credentials.key, credentials.certificate)]
    made = grpc.ssl_server_credentials(pair, credentials.authority, require_client_auth=True)
    return server.add_secure_port(address, made)


def require_loopback(address: str) -> None:
    """Raise unless the address is on this machine, which is the only place for a server without TLS."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    raise ValueError(f"Without TLS, the address must be a loopback address such as 127.0.0.1, got {host!r}. Use TLS.")
