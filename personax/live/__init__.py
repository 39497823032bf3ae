"""The same recipe on real machines: a server and its clients over gRPC with mutual TLS.

    certificates   who may take part
    wire           the calls and their messages
    messages       arrays as safetensors bytes, in pieces with a checksum
    recipe         the recipe that a server sends to its clients
    limits         what a client's owner allows; `acceptance` compares a recipe with it
    journal        what the server has settled, on its disk before it answers; `saved` states to return to
    book           the server's state machine; its numbers are in `arithmetic`, its records in `ledger`
    admission      bounds on uploads
    gate, ports    identity, revocation, rates; `connections` of each certificate
    audit, log     who did what to the server; lines without control characters
    service        the calls, `uploads` among them; `serving` is gRPC around them
    server         one run of a server; `results` is its run folder
    connection     a client's side of the protocol
    membership     one client's visits, personal state and personal model; its numbers are in `visits`
    client         a client over gRPC
    standing, view how it goes, for people and for Prometheus
    demo           a whole federation on one machine

The extra `personax[live]` installs what it needs beside personax.
"""
