"""The same recipe on real machines: a server and its clients over gRPC with mutual TLS.

    certificates   who may take part
    wire           the calls and their messages
    messages       arrays as safetensors bytes, in pieces with a checksum
    recipe         what a server tells its clients to do, and the limits that a client's owner sets
    journal        what the server has settled, on its disk before it answers
    book           the server's state machine; its numbers are in `arithmetic`
    gate, ports    identity, revocation, limits
    service        the server; `server` is one run of it, `results` its run folder
    connection     a client's side of the protocol
    membership     one client's visits, personal state and personal model; its numbers are in `visits`
    client         a client over gRPC
    standing, view how it goes, for people and for Prometheus
    demo           a whole federation on one machine

The extra `personax[live]` installs what it needs beside personax.
"""
