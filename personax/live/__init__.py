"""Run the same recipe on real machines: a server and its clients over gRPC with mutual TLS.

    certificates   the authority and the certificates of server, operator and clients
    wire           the calls and their messages
    messages       arrays as safetensors bytes, in pieces with a checksum
    recipe         the recipe that a server sends to its clients
    limits         the limits set by a client's owner; `acceptance` checks a recipe against them
    journal        settled events, written to disk before the server answers; `saved` has states to roll back to
    book           the server's state machine; `arithmetic` does its computation and `ledger` keeps its records
    admission      bounds on uploads
    gate, ports    identity, revocation, rate limits; `connections` limits them per certificate
    audit, log     the audit log; log lines without control characters
    service        the calls, with `uploads`; `serving` exposes them over gRPC
    server         one run of a server; `results` is its run folder
    connection     a client's side of the protocol
    membership     one client's visits, personal state and personal model; `visits` does the computation
    client         a client over gRPC
    status, view   the state of a run, as text and for Prometheus
    demo           a whole federation on one machine

Install the dependencies with the extra `personax[live]`.
"""
