"""Run any recipe on an existing Flower deployment (SuperLink, SuperNodes, `flwr run`).

    template   a complete Flower app, for `personax flower init`
    server     the ServerApp: a run folder, a book and a driver
    driver     one thread per node, which asks it to train and settles the updates
    client     the ClientApp, which handles one message; the module `personax_flower` loads it without personax
    node       the settings of a node's owner
    channel    the connection from the ClientApp to the node's worker: a Unix socket
    worker     the long-lived process of a node, with its data and compiled programs
    member     one client's answers; its visits and state are in `personax.live.membership`
    records    pytrees as Flower's records; `arrays` is the part that needs no Flower
    api        every name used from Flower's public API

Recipe, server state, journal and reports come from `personax.live`. Install the dependencies with the extra
`personax[flower]`. `client` and its imports do not import JAX, because Flower starts a process for each message.
"""
