"""Any recipe on an existing Flower deployment: its SuperLink, its SuperNodes, `flwr run`.

    template   a ready Flower app, for `personax flower init`
    server     the ServerApp: a run folder, a book and a driver
    driver     one thread for each node: asks it to train, and settles what comes back
    client     the ClientApp, which lives for one message and hands it on; the module `personax_flower` loads it alone
    node       what a node's owner decides
    channel    the way from there to the node's worker: a Unix socket
    worker     the long-lived process of a node: its data, its compiled program
    member     one client's answers; its visits and state are those of `personax.live.membership`
    locks      one process for a folder
    records    pytrees as Flower's records; `arrays` is the part that needs no Flower
    api        all that is used of Flower, which is public

Recipe, server state, journal and numbers are those of `personax.live`. The extra `personax[flower]` installs what they
need. `client` and what it uses import no JAX: Flower starts a process for each message.
"""
